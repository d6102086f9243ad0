// One step: every thread walks the op list, with a barrier after each op.
#define _POSIX_C_SOURCE 200112L
#include "qrt.h"
#include "kernels/scratch.h"
#include <time.h>

typedef struct {
    const qrt_kernels *kernels;
    qrt_pool *pool;
    const qrt_op *ops;
    int n_ops;
    const qrt_batch *batch;
    const qrt_state *state;
    double *seconds;
    uint8_t *scratch; // one region per thread, then the shared one
    size_t scratch_bytes;
    uint8_t *shared;
    int64_t *next; // one counter per op, so that none has to be reset inside the step
} step;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Bytes of a thread's own scratch for an op: see the comments at each kernel.
static size_t own_scratch(const qrt_op *op, const qrt_batch *b, const qrt_state *s) {
    const int64_t rows = op->gathered ? b->n_out : b->n_rows;
    const qrt_view *q = &op->in[0];
    switch (op->kind) {
    case QRT_LINEAR: return qrt_linear_scratch(rows, rows, op->parts[0].w.cols);
    case QRT_MOE_LINEAR: {
        const int64_t entries = rows * op->n[0];
        const qrt_tensor *w = &op->parts[0].w;
        return qrt_linear_scratch(2 * entries + w->experts + 1, entries, w->cols);
    }
    case QRT_ROPE: return qrt_rope_scratch(op->n[0]);
    case QRT_CONV1D_SILU: return qrt_conv_scratch(s->conv_kernel);
    case QRT_DELTA_NET: return qrt_delta_scratch(s->d);
    case QRT_ATTENTION: return qrt_attention_scratch(q->heads, op->n[0], q->dim);
    default: return 0;
    }
}

static size_t shared_scratch(const qrt_op *op, const qrt_batch *b, int threads) {
    if (op->kind != QRT_ATTENTION) return 0;
    return qrt_attention_shared(threads, op->in[0].heads, op->n[0], op->in[0].dim, b->page_width);
}

static void walk(void *arg, int thread, int threads) {
    step *s = arg;
    qrt_ctx c = {.batch = s->batch,
                 .state = s->state,
                 .kernels = s->kernels,
                 .thread = thread,
                 .threads = threads,
                 .scratch = s->scratch + s->scratch_bytes * (size_t)thread,
                 .scratch_bytes = s->scratch_bytes,
                 .shared = s->shared};
    double t0 = s->seconds && thread == 0 ? now() : 0;
    for (int i = 0; i < s->n_ops; i++) {
        c.next = s->next + i * 8;
        s->kernels->op[s->ops[i].kind](&s->ops[i], &c);
        qrt_pool_barrier(s->pool);
        if (s->seconds && thread == 0) {
            double t = now();
            s->seconds[i] += t - t0;
            t0 = t;
        }
    }
}

int qrt_run(const qrt_kernels *kernels, qrt_pool *pool, const qrt_op *ops, int n_ops,
            const qrt_batch *batch, const qrt_state *state, double *seconds) {
    for (int i = 0; i < n_ops; i++)
        if (ops[i].kind < 0 || ops[i].kind >= QRT_N_OPS || !kernels->op[ops[i].kind])
            return QRT_BAD_ARGUMENT;
    int threads = qrt_pool_threads(pool);
    size_t own = 0, shared = 0;
    for (int i = 0; i < n_ops; i++) {
        size_t a = own_scratch(&ops[i], batch, state), b = shared_scratch(&ops[i], batch, threads);
        if (a > own) own = a;
        if (b > shared) shared = b;
    }
    own = (own + 4095) & ~(size_t)4095;
    size_t counters = (size_t)n_ops * 64;
    uint8_t *memory = qrt_pool_scratch(pool, own * (size_t)threads + shared + counters + 64);
    if (!memory) return QRT_NO_MEMORY;
    int64_t *next = (int64_t *)memory;
    memset(next, 0, counters);
    uint8_t *base = memory + ((counters + 63) & ~(size_t)63);
    step s = {.kernels = kernels,
              .pool = pool,
              .ops = ops,
              .n_ops = n_ops,
              .batch = batch,
              .state = state,
              .seconds = seconds,
              .scratch = base,
              .scratch_bytes = own,
              .shared = base + own * (size_t)threads,
              .next = next};
    qrt_pool_run(pool, walk, &s);
    return QRT_OK;
}

// Runs every op of one instruction level and compares it with plain loops in double, or with the
// scalar level where results are equal bit for bit. Built by test_levels.py with LEVEL and all
// kernels of that level and of scalar.
#include "run.c" // for the scratch sizes of a step
#include "levels.h"
#include <pthread.h>
#include <stdarg.h>

#define FILES(X, l)                                                                                \
    X(dequantize, l)                                                                               \
    X(direct, l) X(linear, l) X(norms, l) X(rows, l) X(attention, l) X(delta_net, l)
#define PASTE(file, l) qrt_fill_##file##_##l
#define DECLARE(file, l) void PASTE(file, l)(qrt_kernels *);
#define FILL_BASE(file, l) PASTE(file, l)(&base);
#define FILL_LEVEL(file, l) PASTE(file, l)(&level);
#define EXPAND(M, l) FILES(M, l)
#ifndef LEVEL
#    define LEVEL scalar
#endif
FILES(DECLARE, scalar)
EXPAND(DECLARE, LEVEL)
#ifdef ABOVE // a level that differs from LEVEL in its products alone
#    define LINEAR_OF(l) PASTE(linear, l)
void LINEAR_OF(ABOVE)(qrt_kernels *);
#endif
#ifdef ROUNDS_X
const bool rounds_x = true;
#else
const bool rounds_x = false;
#endif

qrt_kernels level, base;
static int failures;
static char case_name[160];

// ---------------------------------------------------------------- memory and numbers
static void *taken[256];
static int n_taken;

void *take(int64_t bytes) {
    if (n_taken == 256) abort();
    void *p = malloc((size_t)bytes);
    if (!p) abort();
    return taken[n_taken++] = p;
}

void release_all(void) {
    while (n_taken) free(taken[--n_taken]);
}

double uniform(void) {
    static uint64_t seed = 35;
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(seed >> 11) / 9007199254740992.0 * 2 - 1;
}

float *random_floats(int64_t n, double scale) {
    float *p = take(4 * n);
    for (int64_t i = 0; i < n; i++) p[i] = (float)(scale * (uniform() + uniform() + uniform()));
    return p;
}

float *unset_floats(int64_t n) {
    float *p = take(4 * n);
    memset(p, 0xff, (size_t)(4 * n));
    return p;
}

double *doubles(int64_t n) { return take(8 * n); }

void *copy_of(const void *from, int64_t bytes) { return memcpy(take(bytes), from, (size_t)bytes); }

qrt_quant quant_of(int64_t rows, int64_t cols) {
    return (qrt_quant){.q = take(rows * cols),
                       .d = unset_floats(rows * cols / 32),
                       .s32 = unset_floats(rows * cols / 32),
                       .s16 = unset_floats(rows * cols / 16),
                       .n32 = take(rows * cols / 8),
                       .n16 = take(rows * cols / 4),
                       .cols = cols};
}

// ---------------------------------------------------------------- running
typedef struct {
    const qrt_op *op;
    qrt_ctx c;
    pthread_t thread;
} job;

static void *work(void *arg) {
    job *j = arg;
    level.op[j->op->kind](j->op, &j->c);
    return NULL;
}

static uint8_t *scratch_of(size_t bytes) {
    void *p = NULL;
    if (posix_memalign(&p, 64, bytes ? bytes : 1)) abort();
    return memset(p, 0xff, bytes);
}

void run_op(const qrt_op *op, const qrt_batch *batch, const qrt_state *state, int threads) {
    static uint8_t *shared; // what attention leaves there is for the merge
    job jobs[8];
    int64_t next = 0;
    size_t own = own_scratch(op, batch, state);
    if (op->kind == QRT_ATTENTION) {
        free(shared);
        shared = scratch_of(shared_scratch(op, batch, threads));
    }
    if (op->kind == QRT_ATTENTION_MERGE) own = (size_t)qrt_padded(op->in[0].dim) * sizeof(float);
    for (int i = 0; i < threads; i++) {
        jobs[i].op = op;
        jobs[i].c = (qrt_ctx){.kernels = &level,
                              .batch = batch,
                              .state = state,
                              .thread = i,
                              .threads = threads,
                              .scratch = scratch_of(own),
                              .scratch_bytes = own,
                              .next = &next,
                              .shared = shared};
        if (pthread_create(&jobs[i].thread, NULL, work, &jobs[i])) abort();
    }
    for (int i = 0; i < threads; i++) {
        pthread_join(jobs[i].thread, NULL);
        free(jobs[i].c.scratch);
    }
    if (op->kind == QRT_ATTENTION_MERGE) {
        free(shared);
        shared = NULL;
    }
}

// ---------------------------------------------------------------- checks
void name_case(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(case_name, sizeof case_name, format, args);
    va_end(args);
}

void check(const char *what, bool holds) {
    if (!holds) failures++, printf("%s: %s: wrong\n", case_name, what);
}

void check_same(const char *what, const void *a, const void *b, int64_t bytes) {
    if (memcmp(a, b, (size_t)bytes)) failures++, printf("%s: %s: bits differ\n", case_name, what);
}

void check_near(const char *what, const float *got, const double *want, int64_t n, double bound) {
    double error = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        size += want[i] * want[i];
    }
    error = sqrt(error / (size + 1e-30));
    if (!(error <= bound))
        failures++, printf("%s: %s: error %.3g, bound %.3g\n", case_name, what, error, bound);
}

void check_quant(const qrt_quant *quant, const float *x, int64_t rows) {
    for (int64_t b = 0; b < rows * quant->cols / 32; b++, x += 32) {
        float most = 0;
        for (int i = 0; i < 32; i++) most = fmaxf(most, fabsf(x[i]));
        const float d = most / 127;
        int sums[2] = {0, 0};
        bool right = quant->d[b] == d;
        for (int i = 0; i < 32; i++) {
            const int q = d > 0 ? (int)rintf(x[i] / d) : 0;
            sums[i / 16] += q;
            right = right && quant->q[b * 32 + i] == q;
        }
        right = right && quant->s32[b] == d * (float)(sums[0] + sums[1]);
        right = right && quant->n16[2 * b] == sums[0] && quant->n16[2 * b + 1] == sums[1];
        right = right && quant->n32[b] == sums[0] + sums[1];
        right = right && quant->s16[2 * b] == d * (float)sums[0];
        right = right && quant->s16[2 * b + 1] == d * (float)sums[1];
        if (!right) {
            check("quantised", false);
            return;
        }
    }
}

int main(int argc, char **argv) { // argument: rows, state or linear alone
    const char *only = argc > 1 ? argv[1] : NULL;
    FILES(FILL_BASE, scalar)
    EXPAND(FILL_LEVEL, LEVEL)
#ifdef ABOVE
    LINEAR_OF(ABOVE)(&level);
#endif
    for (int i = 0; i < QRT_N_OPS; i++) check("op exists", level.op[i] && base.op[i]);
    if (!only || !strcmp(only, "rows")) test_rows();
    if (!only || !strcmp(only, "state")) test_state();
    if (!only || !strcmp(only, "linear")) test_linear();
    printf("%d failures\n", failures);
    return failures != 0;
}

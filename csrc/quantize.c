// Rows of float32 to rows of blocks, split over the threads of a pool.
#include "qrt.h"
#include <float.h>

bool qrt_block_size(int format, int64_t *elements, int64_t *bytes) {
    switch (format) {
#define X(NAME, name, id, ELEMENTS, BYTES, ...)                                                    \
    case QRT_##NAME: *elements = ELEMENTS, *bytes = BYTES; return true;
        QRT_FLOAT_FORMATS(X)
        QRT_QUANT_FORMATS(X)
#undef X
    }
    return false;
}

typedef struct {
    int (*row)(const float *, const float *, uint8_t *, int64_t);
    const float *x, *importance;
    uint8_t *out;
    int64_t rows, cols, row_bytes;
    int64_t next; // row
    int64_t bad;  // lowest row with a status * 256 + status
} job;

#define NONE INT64_MAX

static void report(job *j, int64_t bad) {
    int64_t seen = __atomic_load_n(&j->bad, __ATOMIC_RELAXED);
    while (bad < seen && !__atomic_compare_exchange_n(&j->bad, &seen, bad, true, __ATOMIC_RELAXED,
                                                      __ATOMIC_RELAXED)) {
    }
}

static void quantize_rows(void *arg, int thread, int threads) {
    job *j = arg;
    (void)thread, (void)threads;
    // Rows are handed out in order, so the lowest bad one is always looked at.
    while (__atomic_load_n(&j->bad, __ATOMIC_RELAXED) == NONE) {
        int64_t r = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
        if (r >= j->rows) return;
        int status = j->row(j->x + r * j->cols, j->importance, j->out + r * j->row_bytes, j->cols);
        if (status != QRT_OK) report(j, r * 256 + status);
    }
}

int qrt_quantize(const qrt_kernels *k, qrt_pool *pool, int format, const float *x,
                 const float *importance, uint8_t *out, int64_t rows, int64_t cols) {
    int64_t elements, bytes;
    if (!qrt_block_size(format, &elements, &bytes) || !k->quantize[format] || cols % elements)
        return QRT_BAD_ARGUMENT;
    if (importance) {
        for (int64_t i = 0; i < cols; i++)
            if (!(importance[i] >= 0 && importance[i] <= FLT_MAX)) return QRT_BAD_ARGUMENT;
    }
    job j = {.row = k->quantize[format],
             .x = x,
             .importance = importance,
             .out = out,
             .rows = rows,
             .cols = cols,
             .row_bytes = cols / elements * bytes,
             .bad = NONE};
    qrt_pool_run(pool, quantize_rows, &j);
    return j.bad == NONE ? QRT_OK : (int)(j.bad % 256);
}

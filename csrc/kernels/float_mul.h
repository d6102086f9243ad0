// Products of F32, F16 or BF16 weights with float32 rows: dot products along the columns, in QF
// lanes that are summed at the end; columns behind the last whole vector are added one by one.
// Always in this order, so that a result never depends on how many x rows a call has.
// At avx512bf16, BF16 weights meet x rounded to bfloat16: twice the columns in an instruction, and
// nothing to widen.
#ifndef QRT_FLOAT_MUL_H
#define QRT_FLOAT_MUL_H
#include "product.h"
#include "scratch.h"

#define FROWS                                                                                      \
    4 // weight rows and x rows of a tile: twelve sums and their operands fill 16 registers
#define FTILE 3
#define FSET QRT_FLOAT_ROWS // weight rows that are worked on together

#ifdef QRT_LEVEL_AVX512BF16
#    define IN_PAIRS(format) ((format) == QRT_BF16) // two columns to a lane
#else
#    define IN_PAIRS(format) ((void)(format), 0)
#endif

INLINE qf load_weights(const int format, const uint8_t *row, int64_t k) {
    if (format == QRT_F32) return qf_load((const float *)row + k);
    const uint16_t *h = (const uint16_t *)row + k;
#ifdef QRT_LEVEL_AVX512BF16
    if (IN_PAIRS(format)) return qf_pairs(h);
#endif
    return format == QRT_F16 ? qf_from_f16(h) : qf_from_bf16(h);
}

INLINE float one_weight(const int format, const uint8_t *row, int64_t k) {
    float f;
    if (format == QRT_F32) {
        memcpy(&f, row + 4 * k, 4);
    } else if (format == QRT_F16) {
        f = qrt_half(row + 2 * k);
    } else {
        uint32_t u = (uint32_t)qrt_u16(row + 2 * k) << 16;
        memcpy(&f, &u, 4);
    }
    return f;
}

INLINE int64_t vector_columns(const int format) { return IN_PAIRS(format) ? 2 * QF : QF; }

// Rows of x are float32, or bfloat16 for weights in pairs.
INLINE qf load_x(const int format, const void *x, int64_t k) {
#ifdef QRT_LEVEL_AVX512BF16
    if (IN_PAIRS(format)) return qf_pairs((const uint16_t *)x + k);
#endif
    (void)format;
    return qf_load((const float *)x + k);
}
INLINE float one_x(const int format, const void *x, int64_t k) {
    return one_weight(IN_PAIRS(format) ? QRT_BF16 : QRT_F32, x, k);
}
INLINE qf add_products(const int format, qf w, qf x, qf sums) {
#ifdef QRT_LEVEL_AVX512BF16
    if (IN_PAIRS(format)) return qf_fma_pairs(w, x, sums);
#endif
    (void)format;
    return qf_fma(w, x, sums);
}

// x rows, n pointers, become bfloat16 in `to`.
INLINE void round_rows(const void **x, int64_t n, int64_t cols, void *to) {
#ifdef QRT_LEVEL_AVX512BF16
    uint16_t *row = (uint16_t *)(((uintptr_t)to + 63) & ~(uintptr_t)63);
    for (int64_t t = 0; t < n; t++, row += qrt_bf16_row(cols)) {
        const float *from = x[t];
        int64_t k = 0;
        for (; k + QF <= cols; k += QF) qf_to_bf16(row + k, qf_load(from + k));
        if (k < cols) {
            const int left = (int)(cols - k);
            qf_to_bf16(row + k, qf_load_part(from + k, left));
        }
        x[t] = row;
    }
#else
    (void)x, (void)n, (void)cols, (void)to;
#endif
}

// n columns (whole vectors) of w from column wk on and of x from column xk on; sums
// [mr][FROWS][QF], replaced if `first`, else added to.
INLINE void dot_tile(const int format, const int mr, const uint8_t *const *w, int64_t wk,
                     const void *const *x, int64_t xk, int64_t n, int first, float *sums) {
    const int64_t step = vector_columns(format);
    qf a[FTILE][FROWS];
#pragma GCC unroll 4
    for (int t = 0; t < mr; t++)
#pragma GCC unroll 4
        for (int r = 0; r < FROWS; r++)
            a[t][r] = first ? qf_zero() : qf_load(sums + (t * FROWS + r) * QF);
    for (int64_t k = 0; k < n; k += step) {
        qf xv[FTILE];
#pragma GCC unroll 4
        for (int t = 0; t < mr; t++) xv[t] = load_x(format, x[t], xk + k);
#pragma GCC unroll 4
        for (int r = 0; r < FROWS; r++) {
            const qf wv = qf_held(load_weights(format, w[r], wk + k));
#pragma GCC unroll 4
            for (int t = 0; t < mr; t++) a[t][r] = add_products(format, wv, xv[t], a[t][r]);
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < mr; t++)
#pragma GCC unroll 4
        for (int r = 0; r < FROWS; r++) qf_store(sums + (t * FROWS + r) * QF, a[t][r]);
}

// n columns (whole vectors) of FSET weight rows against one x row; sums [FSET][QF]. The rows may
// be streams of their own: the lines of all of them are fetched some time before they are needed.
INLINE void dot_rows(const int format, const uint8_t *const *w, const void *x, int64_t n,
                     float *sums) {
    enum { LINE = 64 };
    const int64_t each = LINE / (format == QRT_F32 ? 4 : 2); // columns of a line
    qf a[FSET];
#pragma GCC unroll 8
    for (int r = 0; r < FSET; r++) a[r] = qf_zero();
    for (int64_t k0 = 0; k0 < n; k0 += each) {
        const int64_t end = n - k0 < each ? n : k0 + each;
#pragma GCC unroll 8
        for (int r = 0; r < FSET; r++)
            __builtin_prefetch(w[r] + k0 * LINE / each + STREAM_AHEAD, 0, 3);
        for (int64_t k = k0; k < end; k += vector_columns(format)) {
            const qf xv = load_x(format, x, k);
#pragma GCC unroll 8
            for (int r = 0; r < FSET; r++)
                a[r] = add_products(format, load_weights(format, w[r], k), xv, a[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < FSET; r++) qf_store(sums + r * QF, a[r]);
}

// FSET weight rows against n x rows. y [n][FSET]; sums [FSET / FROWS][n][FROWS][QF] and wide
// [FSET][QRT_WIDE] are scratch. With several x rows the weights are widened once, QRT_WIDE columns
// at a time, and each tile of x meets all of them while both lie in the first-level cache. Weights
// in pairs are read as they are stored.
INLINE void mul_float(const int format, const uint8_t *const *w, const void *const *x, int64_t n,
                      int64_t cols, float *sums, float *wide, float *y) {
    const int met = IN_PAIRS(format) ? format : QRT_F32; // what a tile meets
    const int64_t whole = cols / vector_columns(format) * vector_columns(format);
    if (whole == 0) memset(sums, 0, (size_t)(n * FSET * QF) * sizeof(float));
    if (n == 1) {
        dot_rows(format, w, x[0], whole, sums);
    } else {
        for (int64_t k = 0; k < whole; k += QRT_WIDE) {
            const int64_t m = whole - k < QRT_WIDE ? whole - k : QRT_WIDE;
            const uint8_t *from[FSET];
            for (int r = 0; r < FSET; r++) {
                if (IN_PAIRS(format)) {
                    from[r] = w[r] + 2 * k;
                    continue;
                }
                from[r] = (const uint8_t *)(wide + r * QRT_WIDE);
                for (int64_t i = 0; i < m; i += QF)
                    qf_store(wide + r * QRT_WIDE + i, load_weights(format, w[r], k + i));
            }
            for (int64_t t = 0; t < n; t += FTILE)
                for (int g = 0; g < FSET / FROWS; g++) {
                    float *to = sums + (g * n + t) * FROWS * QF;
                    const uint8_t *const *f = from + g * FROWS;
                    if (n - t >= 3) dot_tile(met, 3, f, 0, x + t, k, m, k == 0, to);
                    else if (n - t == 2) dot_tile(met, 2, f, 0, x + t, k, m, k == 0, to);
                    else dot_tile(met, 1, f, 0, x + t, k, m, k == 0, to);
                }
        }
    }
    for (int64_t t = 0; t < n; t++)
        for (int r = 0; r < FSET; r++) {
            const int64_t at = (r / FROWS * n + t) * FROWS + r % FROWS;
            float s = qf_hsum(qf_load(sums + at * QF));
            for (int64_t k = whole; k < cols; k++)
                s += one_weight(format, w[r], k) * one_x(format, x[t], k);
            y[t * FSET + r] = s;
        }
}
#endif

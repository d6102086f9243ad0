// What products of a linear op are told, and where results go.
#ifndef QRT_PRODUCT_H
#define QRT_PRODUCT_H
#include "kernels.h"

#define HAS_MINIMA(bits, off) ((bits) < 8 && (off) == 0)
#if defined(QRT_LEVEL_AVX512) || defined(QRT_LEVEL_AVX512BF16)
#    define INT8_OFF 128 // makes int8 unsigned
#else
#    define INT8_OFF 0
#endif
#define TAKEN(bits, off) ((bits) == 8 ? INT8_OFF : (off)) // off q as products meet it

enum {
#define X(NAME, name, id, ELEMENTS, BYTES, BITS, GROUP, OFF)                                       \
    name##_bits = BITS, name##_group = GROUP, name##_elements = ELEMENTS, name##_bytes = BYTES,    \
    name##_minima = HAS_MINIMA(BITS, OFF),
    QRT_QUANT_FORMATS(X)
#undef X
};

// Where weights are read in streams, so many bytes of each are fetched before they are needed.
#define STREAM_AHEAD 256

// One matrix against chosen x rows: out row out_rows[i] (of `ld` floats) gets w[row0 .. row0 +
// rows) . x row x_rows[i].
typedef struct qrt_product {
    const qrt_tensor *w;
    const uint8_t *data; // of the expert
    float scale;
    const qrt_quant *x;    // for quantised weights
    const int32_t *starts; // of their sums, [n][cols / group]; see set_starts
    const float *xf;       // for float weights, rows of w->cols, x_ld apart
    int64_t x_ld;
    const int32_t *x_rows, *out_rows;
    int64_t n; // x rows
    float *out;
    int64_t ld;
    const float *residual;
} product;

INLINE void store_row(const product *p, int64_t i, int64_t row, const float *y, int64_t n) {
    const int64_t at = p->out_rows[i] * p->ld + row;
    const float scale = p->w->scale ? p->scale : 1;
    int64_t r = 0;
    for (; r + QF <= n; r += QF) {
        qf v = qf_mul(qf_load(y + r), qf_set1(scale));
        if (p->residual) v = qf_add(v, qf_load(p->residual + at + r));
        qf_store(p->out + at + r, v);
    }
    for (; r < n; r++) {
        const float v = y[r] * scale;
        p->out[at + r] = p->residual ? v + p->residual[at + r] : v;
    }
}

// The same for n rows, `apart` rows from each other.
static void store_rows(const product *p, int64_t i, int64_t row, int64_t apart, const float *y,
                       int n) {
    if (apart == 1) {
        store_row(p, i, row, y, n);
    } else {
        for (int r = 0; r < n; r++) store_row(p, i, row + r * apart, y + r, 1);
    }
}

// One x row: pointers at a column. starts[g]: where the whole sum of group g begins; unset where
// nothing is taken off weights.
typedef struct {
    const int8_t *q;
    const float *d, *s;
    const int32_t *starts;
} xrow;

// x row xs[i] from block `first` of 32 columns on; starts: [n][cols / group]
INLINE xrow x_row(const qrt_quant *x, const int32_t *xs, const int32_t *starts, int64_t i,
                  int64_t first, const int group) {
    const int64_t blocks = x->cols / 32, at = xs[i] * blocks + first, per = 32 / group;
    return (xrow){x->q + at * 32, x->d + at, (group == 32 ? x->s32 : x->s16) + at * per,
                  starts + (i * blocks + first) * per};
}
#endif

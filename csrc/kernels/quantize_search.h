// What the quantisers of all block formats share: blocks brought to a common size, and searches for
// scales that try many candidates at once.
//
// Candidates lie in vector lanes and elements are walked one by one, so every candidate's sums are
// added in the same order at each instruction level: all levels write the same bytes.
#ifndef QRT_QUANTIZE_SEARCH_H
#define QRT_QUANTIZE_SEARCH_H
#include "kernels.h"

#define CANDIDATES 16
#define VECTORS (CANDIDATES / QF)
#define TINY 1e-30f // scales below it count as zero

// A block divided by `unit`, a power of two, so that its largest |x| is in [1, 2): searches need
// not think of overflow. w: weights of the squared error, about 1.
typedef struct {
    float x[256], w[256];
    float unit, inverse;
} block;

// Where integers may lie; or, with a table, the values that x / scale is rounded to.
typedef struct {
    float lo, hi;
    const float *values, *middles; // NULL, or 16 values and the 15 boundaries between them
} grid;

static inline uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static inline float of_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// To float16, nearest even; what exceeds 65504 after rounding becomes infinite.
static inline uint16_t half_of(float f) {
    uint32_t u = bits_of(f), sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (u < 0x38800000) // subnormal: steps of 2^-24, counted in the low bits of 2^-1 + |f|
        return (uint16_t)(sign | (bits_of(of_bits(u) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((u + 0xfff + (u >> 13 & 1)) - 0x38000000) >> 13);
}

static inline float of_half(uint16_t h) {
    uint8_t b[2];
    memcpy(b, &h, 2);
    return qrt_half(b);
}

static inline void put16(uint8_t *p, uint16_t h) { memcpy(p, &h, 2); }

// The scale nearest to `s` (of a block in units) that float16 can hold, not zero unless s is;
// *h: its bits. False if there is none.
static inline bool storable(const block *b, float s, uint16_t *h, float *stored) {
    *h = half_of(s * b->unit);
    if ((*h & 0x7fff) == 0x7c00) return false;
    if ((*h & 0x7fff) == 0 && s != 0) *h = s < 0 ? 0x8001 : 1;
    *stored = of_half(*h) * b->inverse;
    return true;
}

// QRT_OK, or QRT_BAD_VALUE: n values, a multiple of 16.
static inline int check_finite(const float *x, int64_t n) {
    qf sum = qf_zero();
    for (int64_t i = 0; i < n; i += QF) sum = qf_add(sum, qf_sub(qf_load(x + i), qf_load(x + i)));
    return qf_hsum(sum) == 0 ? QRT_OK : QRT_BAD_VALUE;
}

// Reads n values, a multiple of 16, and their importance. False for a block that counts as zero:
// below 2^-30 no float16 scale can tell it from zero.
static inline bool load_block(block *b, const float *x, const float *importance, int n) {
    qf m = qf_zero();
    for (int i = 0; i < n; i += QF) m = qf_max(m, qf_abs(qf_load(x + i)));
    float amax = qf_hmax(m);
    if (amax < 0x1p-30f) return false;
    b->unit = of_bits(bits_of(amax) & 0x7f800000);
    b->inverse = 1.0f / b->unit;
    for (int i = 0; i < n; i++) b->x[i] = x[i] * b->inverse;
    double sum = 0;
    for (int i = 0; importance && i < n; i++) sum += importance[i];
    // A column that the importance calls useless still gets a sane value.
    double scale = sum > 0 ? n / sum : 0;
    for (int i = 0; i < n; i++) b->w[i] = sum > 0 ? (float)(importance[i] * scale) + 1e-4f : 1.0f;
    return true;
}

INLINE qf round_to(const grid *g, qf y) {
    if (!g->values) return qf_round(qf_min(qf_max(y, qf_set1(g->lo)), qf_set1(g->hi)));
    qf v = qf_set1(g->values[0]);
#pragma GCC unroll 15
    for (int k = 0; k < 15; k++) {
        qf step = qf_set1(g->values[k + 1] - g->values[k]);
        v = qf_add(v, qf_above(y, qf_set1(g->middles[k]), step));
    }
    return v;
}

static inline float reciprocal(float s) { return s > TINY || s < -TINY ? 1.0f / s : 0.0f; }

// errors[c] = sum w (x - (s[c] * q - m[c]))^2 over n elements, q the nearest of the grid.
INLINE void errors_of(const grid *g, const float *x, const float *w, int n, const float *s,
                      const float *m, float *errors) {
    float inv[CANDIDATES];
    for (int c = 0; c < CANDIDATES; c++) inv[c] = reciprocal(s[c]);
    qf sv[VECTORS], mv[VECTORS], iv[VECTORS], e[VECTORS];
    for (int j = 0; j < VECTORS; j++) {
        sv[j] = qf_load(s + j * QF), mv[j] = qf_load(m + j * QF), iv[j] = qf_load(inv + j * QF);
        e[j] = qf_zero();
    }
    for (int i = 0; i < n; i++) {
        qf xi = qf_set1(x[i]), wi = qf_set1(w[i]);
        for (int j = 0; j < VECTORS; j++) {
            qf t = qf_add(xi, mv[j]);
            qf r = qf_sub(t, qf_mul(sv[j], round_to(g, qf_mul(t, iv[j]))));
            e[j] = qf_add(e[j], qf_mul(wi, qf_mul(r, r)));
        }
    }
    for (int j = 0; j < VECTORS; j++) qf_store(errors + j * QF, e[j]);
}

// Weighted sums over the elements of a group, for each candidate: q, q^2, x q.
typedef struct {
    float q[CANDIDATES], qq[CANDIDATES], xq[CANDIDATES];
} sums;

// Sums for q = the nearest of the grid to (x - from[c]) * inv[c].
INLINE void sums_of(const grid *g, const float *x, const float *w, int n, const float *from,
                    const float *inv, sums *out) {
    qf fv[VECTORS], iv[VECTORS], q[VECTORS], qq[VECTORS], xq[VECTORS];
    for (int j = 0; j < VECTORS; j++) {
        fv[j] = qf_load(from + j * QF), iv[j] = qf_load(inv + j * QF);
        q[j] = qq[j] = xq[j] = qf_zero();
    }
    for (int i = 0; i < n; i++) {
        qf xi = qf_set1(x[i]), wi = qf_set1(w[i]);
        for (int j = 0; j < VECTORS; j++) {
            qf v = round_to(g, qf_mul(qf_sub(xi, fv[j]), iv[j]));
            qf wv = qf_mul(wi, v);
            q[j] = qf_add(q[j], wv);
            qq[j] = qf_add(qq[j], qf_mul(wv, v));
            xq[j] = qf_add(xq[j], qf_mul(wv, xi));
        }
    }
    for (int j = 0; j < VECTORS; j++) {
        qf_store(out->q + j * QF, q[j]);
        qf_store(out->qq + j * QF, qq[j]);
        qf_store(out->xq + j * QF, xq[j]);
    }
}

// Index of the lowest; the first of equals.
static inline int lowest(const float *v) {
    int at = 0;
    for (int c = 1; c < CANDIDATES; c++)
        if (v[c] < v[at]) at = c;
    return at;
}

// The scale s with the least sum w (x - s q)^2 over n elements, q in the grid: the best of 16 *
// rounds quotients between `from` and `to` times 1 / max |x|, negative ones too if `both`, each
// with its least-squares scale; the best are rounded anew with that.
INLINE float best_scale(const grid *g, const float *x, const float *w, int n, float from, float to,
                        int rounds, bool both) {
    float amax = 0;
    for (int i = 0; i < n; i++) amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    if (amax < TINY) return 0;
    static const float none[CANDIDATES] = {0};
    float gain[CANDIDATES] = {0}, scale[CANDIDATES] = {0}, inv[CANDIDATES];
    const float step = (to - from) / (float)(rounds * CANDIDATES);
    for (int round = 0; round < rounds * (both ? 2 : 1) + 1; round++) {
        const bool last = round == rounds * (both ? 2 : 1);
        const float sign = round < rounds ? 1.0f : -1.0f;
        for (int c = 0; c < CANDIDATES; c++) {
            float at = from + step * (float)(round % rounds * CANDIDATES + c);
            inv[c] = last ? reciprocal(scale[c]) : sign * at / amax;
        }
        sums s;
        sums_of(g, x, w, n, none, inv, &s);
        for (int c = 0; c < CANDIDATES; c++) {
            float fit = s.qq[c] > 0 ? s.xq[c] / s.qq[c] : 0;
            float g2 = fit * s.xq[c];
            scale[c] = g2 > gain[c] ? fit : scale[c];
            gain[c] = g2 > gain[c] ? g2 : gain[c];
        }
    }
    int at = 0;
    for (int c = 1; c < CANDIDATES; c++)
        if (gain[c] > gain[at]) at = c;
    return scale[at];
}

// The float16 scale near s (in units) with the least error over n elements: the best of 16 values
// `stride` steps apart. False if float16 does not reach.
INLINE bool best_half(const block *b, const grid *g, int n, float s, int stride, uint16_t *h,
                      float *stored) {
    if (!storable(b, s, h, stored)) return false;
    float scales[CANDIDATES], errors[CANDIDATES];
    static const float none[CANDIDATES] = {0};
    uint16_t halves[CANDIDATES];
    for (int c = 0; c < CANDIDATES; c++) {
        int at = (*h & 0x7fff) + (c - CANDIDATES / 2) * stride;
        at = at < 1 ? 1 : at > 0x7bff ? 0x7bff : at;
        halves[c] = (uint16_t)((*h & 0x8000) | at);
        scales[c] = of_half(halves[c]) * b->inverse;
    }
    errors_of(g, b->x, b->w, n, scales, none, errors);
    int at = lowest(errors);
    *h = halves[at], *stored = scales[at];
    return true;
}

// q[i] = the integer of the grid (no table) nearest to (x + m) / s, minus `lowest`.
static inline void round_block(const grid *g, const float *x, int n, float s, float m, uint8_t *q) {
    float y[32];
    const float inv = reciprocal(s);
    for (int i = 0; i < n; i += QF) {
        qf t = qf_mul(qf_add(qf_load(x + i), qf_set1(m)), qf_set1(inv));
        qf_store(y + i, qf_sub(round_to(g, t), qf_set1(g->lo)));
    }
    for (int i = 0; i < n; i++) q[i] = (uint8_t)(int)y[i];
}

// 32 values below 16: low nibbles are the first half.
static inline void pack_nibbles(const uint8_t *q, uint8_t *out) {
    for (int i = 0; i < 16; i++) out[i] = (uint8_t)((q[i] & 15) | (q[i + 16] & 15) << 4);
}
#endif

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
// How often the float16 scales of a super-block are fitted to its integers, and these chosen anew.
#define REFITS 3
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

// A float16 scale for `s` (of a block in units), not zero unless s is; *h: its bits. The nearest,
// but among the coarse subnormal ones the next that is no smaller: a scale too large costs
// precision, one too small cuts values off. False if there is none.
static inline bool storable(const block *b, float s, uint16_t *h, float *stored) {
    *h = half_of(s * b->unit);
    *stored = of_half(*h) * b->inverse;
    if (fabsf(*stored) < 0.98f * fabsf(s))
        *h = (uint16_t)(s < 0 ? 0x8000 : 0) | ((*h & 0x7fff) + 1);
    *stored = of_half(*h) * b->inverse;
    return (*h & 0x7fff) < 0x7c00;
}

// QRT_OK, or QRT_BAD_VALUE: n values, a multiple of 16.
static inline int check_finite(const float *x, int64_t n) {
    qf sum = qf_zero();
    for (int64_t i = 0; i < n; i += QF) sum = qf_add(sum, qf_sub(qf_load(x + i), qf_load(x + i)));
    return qf_hsum(sum) == 0 ? QRT_OK : QRT_BAD_VALUE;
}

// Reads n values, a multiple of 16, and their importance. A block below 2^-30, which no float16
// scale can tell from zero, becomes zeros.
static inline void load_block(block *b, const float *x, const float *importance, int n) {
    qf m = qf_zero();
    for (int i = 0; i < n; i += QF) m = qf_max(m, qf_abs(qf_load(x + i)));
    float amax = qf_hmax(m);
    const bool zero = amax < 0x1p-30f;
    b->unit = zero ? 1.0f : of_bits(bits_of(amax) & 0x7f800000);
    b->inverse = 1.0f / b->unit;
    for (int i = 0; i < n; i++) b->x[i] = zero ? 0.0f : x[i] * b->inverse;
    double sum = 0;
    for (int i = 0; importance && i < n; i++) sum += importance[i];
    // A column that the importance calls useless still gets a sane value.
    double scale = sum > 0 ? n / sum : 0;
    for (int i = 0; i < n; i++) b->w[i] = sum > 0 ? (float)(importance[i] * scale) + 1e-4f : 1.0f;
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
    // Of equals (few different values) the smallest scale: its multiples can be had as well.
    const float enough = gain[at] * (1 - 1e-6f);
    for (int c = 0; c < CANDIDATES; c++)
        if (gain[c] >= enough && scale[c] < scale[at]) at = c;
    return scale[at];
}

// x is about s * q - m.
typedef struct {
    float s, m;
} line;

// Keeps in `kept` each candidate's least-squares line for the q that the sums tell of, where it
// explains more than what is there. w, wx: sums of w and w x. floor: m may not be negative.
INLINE void keep_lines(const sums *s, float w, float wx, bool floor, float *gain, float *scale,
                       float *minimum) {
    for (int c = 0; c < CANDIDATES; c++) {
        float det = w * s->qq[c] - s->q[c] * s->q[c];
        float a = det > 1e-6f * w * s->qq[c] ? (w * s->xq[c] - wx * s->q[c]) / det : 0;
        float b = (wx - a * s->q[c]) / w;
        bool above = floor && b > 0;
        float through = s->qq[c] > 0 ? s->xq[c] / s->qq[c] : 0; // zero
        a = above ? (through > 0 ? through : 0) : a;
        b = above ? 0 : b;
        // What sum w x^2 loses; at the optimum of a, b it is this linear expression.
        float g = a * s->xq[c] + b * wx;
        bool better = g > gain[c];
        gain[c] = better ? g : gain[c];
        scale[c] = better ? a : scale[c];
        minimum[c] = better ? -b : minimum[c];
    }
}

// The line with the least sum w (x - (s q - m))^2, q in 0..g->hi: of 64 pairs of ends around the
// smallest and the largest x, each with its least-squares line, the best are rounded anew twice.
INLINE line best_line(const grid *g, const float *x, const float *w, int n, bool floor) {
    float lo = x[0], hi = x[0], sw = 0, swx = 0;
    for (int i = 0; i < n; i++) {
        lo = x[i] < lo ? x[i] : lo, hi = x[i] > hi ? x[i] : hi;
        sw += w[i], swx += w[i] * x[i];
    }
    if (floor && lo > 0) lo = 0;
    if (hi - lo < 1e-12f) return (line){0, -lo};
    const float step = (hi - lo) / g->hi;
    float gain[CANDIDATES], scale[CANDIDATES], minimum[CANDIDATES];
    for (int c = 0; c < CANDIDATES; c++) gain[c] = -1, scale[c] = minimum[c] = 0;
    for (int round = 0; round < 6; round++) {
        float from[CANDIDATES], inv[CANDIDATES];
        for (int c = 0; c < CANDIDATES; c++) {
            float a = (float)(c & 7) * 0.2f - 0.4f, b = (float)(2 * round + c / 8) * 0.2f - 0.4f;
            float l = lo + a * step, h = hi - b * step;
            from[c] = round < 4 ? l : -minimum[c];
            inv[c] = round < 4 ? g->hi / (h - l) : reciprocal(scale[c]);
        }
        sums s;
        sums_of(g, x, w, n, from, inv, &s);
        keep_lines(&s, sw, swx, floor, gain, scale, minimum);
    }
    int at = 0;
    for (int c = 1; c < CANDIDATES; c++)
        if (gain[c] > gain[at]) at = c;
    // Of equals (few different values) the smallest scale: its multiples can be had as well.
    const float enough = gain[at] * (1 - 1e-6f);
    for (int c = 0; c < CANDIDATES; c++)
        if (gain[c] >= enough && scale[c] < scale[at]) at = c;
    return (line){scale[at], minimum[at]};
}

// The float16 scale near s (in units) with the least error over n elements: the best of 16 values
// `stride` steps apart. False if float16 does not reach.
INLINE bool best_half(const block *b, const grid *g, const float *x, int n, float s, int stride,
                      uint16_t *h, float *stored) {
    if (!storable(b, s, h, stored)) return false;
    if (s == 0) return true;
    float scales[CANDIDATES], errors[CANDIDATES];
    static const float none[CANDIDATES] = {0};
    uint16_t halves[CANDIDATES];
    for (int c = 0; c < CANDIDATES; c++) {
        int at = (*h & 0x7fff) + (c - CANDIDATES / 2) * stride;
        at = at < 0 ? 0 : at > 0x7bff ? 0x7bff : at;
        halves[c] = (uint16_t)((*h & 0x8000) | at);
        scales[c] = of_half(halves[c]) * b->inverse;
    }
    errors_of(g, x, b->w, n, scales, none, errors);
    int at = lowest(errors);
    *h = halves[at], *stored = scales[at];
    return true;
}

// v[i] = the value of the grid nearest to (x + m) / s.
INLINE void round_values(const grid *g, const float *x, int n, float s, float m, float *v) {
    const qf inv = qf_set1(reciprocal(s)), mv = qf_set1(m);
    for (int i = 0; i < n; i += QF)
        qf_store(v + i, round_to(g, qf_mul(qf_add(qf_load(x + i), mv), inv)));
}

// The same as integers from 0 up: places in the table, or distances from g->lo.
INLINE void round_block(const grid *g, const float *x, int n, float s, float m, uint8_t *q) {
    float v[32];
    round_values(g, x, n, s, m, v);
    if (!g->values) {
        for (int i = 0; i < n; i++) q[i] = (uint8_t)(int)(v[i] - g->lo);
        return;
    }
    for (int i = 0; i < n; i++) {
        int at = 0;
        for (int k = 1; k < 16; k++) at += v[i] >= g->values[k];
        q[i] = (uint8_t)at;
    }
}

static inline int clamp_int(int v, int lo, int hi) { return v < lo ? lo : v > hi ? hi : v; }

// A format with integer scales and no minima: value = d * scale * q.
typedef struct {
    int group;          // elements
    int lo, hi;         // of scale
    float from, to;     // as for best_scale
    int rounds;         // likewise, of 16 candidates
    int near, mirrored; // scales tried around the first guess, and around its negative: 16s
} symmetric_format;

typedef struct {
    float d; // as stored, in units of the block
    uint16_t dh;
    int8_t scale[16];
    float error;
} symmetric_fit;

// Integer scales of all groups for a given d, near those in `fit`. False if float16 cannot hold d.
INLINE bool choose_scales(const symmetric_format *f, const grid *g, const block *b, float d,
                          int near, int mirrored, symmetric_fit *fit) {
    static const float none[CANDIDATES] = {0};
    if (!storable(b, d, &fit->dh, &fit->d)) return false;
    fit->error = 0;
    for (int i = 0; i < 256 / f->group; i++) {
        float best = INFINITY;
        int centre = fit->scale[i];
        for (int part = 0; part < near + mirrored; part++) {
            float s[CANDIDATES], errors[CANDIDATES];
            int from = part < near
                           ? centre - near * CANDIDATES / 2 + part * CANDIDATES
                           : -centre - mirrored * CANDIDATES / 2 + (part - near) * CANDIDATES;
            from = clamp_int(from, f->lo, f->hi + 1 - CANDIDATES);
            for (int c = 0; c < CANDIDATES; c++) s[c] = fit->d * (float)(from + c);
            errors_of(g, b->x + i * f->group, b->w + i * f->group, f->group, s, none, errors);
            int at = lowest(errors);
            if (errors[at] < best) best = errors[at], fit->scale[i] = (int8_t)(from + at);
        }
        fit->error += best;
    }
    return true;
}

// Least squares for d, the integers given.
INLINE float refit_scale(const symmetric_format *f, const grid *g, const block *b,
                         const symmetric_fit *fit) {
    double ss = 0, xs = 0;
    for (int i = 0; i < 256 / f->group; i++) {
        const float *x = b->x + i * f->group, *w = b->w + i * f->group;
        double scale = fit->scale[i];
        float v[32];
        round_values(g, x, f->group, fit->d * (float)fit->scale[i], 0, v);
        for (int k = 0; k < f->group; k++) {
            double y = scale * v[k];
            ss += w[k] * y * y, xs += w[k] * y * x[k];
        }
    }
    return ss > 0 ? (float)(xs / ss) : 0;
}

INLINE bool fit_scales(const symmetric_format *f, const grid *g, const block *b,
                       symmetric_fit *fit) {
    const int groups = 256 / f->group;
    float ideal[16], largest = 0;
    for (int i = 0; i < groups; i++) {
        ideal[i] = best_scale(g, b->x + i * f->group, b->w + i * f->group, f->group, f->from, f->to,
                              f->rounds, true);
        if (fabsf(ideal[i]) > fabsf(largest)) largest = ideal[i];
    }
    // The largest becomes lo, which has room for one more than hi.
    float d = largest / (float)f->lo;
    if (!storable(b, d, &fit->dh, &fit->d)) return false;
    for (int i = 0; i < groups; i++) {
        float s = ideal[i] * reciprocal(fit->d);
        fit->scale[i] = (int8_t)clamp_int((int)(s < 0 ? s - 0.5f : s + 0.5f), f->lo, f->hi);
    }
    if (!choose_scales(f, g, b, d, f->near, f->mirrored, fit)) return false;
    for (int round = 0; round < REFITS; round++) {
        symmetric_fit next = *fit;
        d = refit_scale(f, g, b, fit);
        if (!choose_scales(f, g, b, d, 1, 0, &next) || next.error >= fit->error) break;
        *fit = next;
    }
    return true;
}

// A row of whole blocks: `write` stores one.
INLINE int quantize_row(const float *x, const float *importance, uint8_t *row, int64_t n,
                        int elements, int bytes, int (*write)(const block *, uint8_t *)) {
    if (check_finite(x, n) != QRT_OK) return QRT_BAD_VALUE;
    for (int64_t at = 0; at < n; at += elements, row += bytes) {
        block b;
        load_block(&b, x + at, importance ? importance + at : NULL, elements);
        int status = write(&b, row);
        if (status != QRT_OK) return status;
    }
    return QRT_OK;
}

// 32 values below 16: low nibbles are the first half.
static inline void pack_nibbles(const uint8_t *q, uint8_t *out) {
    for (int i = 0; i < 16; i++) out[i] = (uint8_t)((q[i] & 15) | (q[i + 16] & 15) << 4);
}
#endif

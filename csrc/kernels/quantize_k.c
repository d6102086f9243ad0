// Rows of float32 to the K formats: super-blocks of 256 with integer scales for each 16 or 32.
//
// Each group first gets the scale (and minimum) that suits it best. From these follow the float16
// scales of the super-block; then every group takes the integer scales near its own that, with its
// values rounded anew, leave the least error, and the float16 scales become those of least squares
// for what was chosen. The last two steps repeat while the error falls.
#include "quantize_search.h"

// A format with minima: value = d * scale * q - dmin * min.
typedef struct {
    int group;        // elements
    float top;        // of q
    int limit;        // of scale and min
    int scales, mins; // how far from the first guess they are searched: +-
} affine_format;

typedef struct {
    uint16_t d, dmin;
    uint8_t scale[16], min[16], q[256];
} affine_block;

typedef struct {
    float d, dmin; // as stored, in units of the block
    uint16_t dh, mh;
    int scale[16], min[16];
    float error;
} affine_fit;

// Best integer scales of one group near (scale, min); returns the error.
INLINE float choose_pair(const affine_format *f, const float *x, const float *w, float d,
                         float dmin, int reach_s, int reach_m, int *scale, int *min) {
    const grid g = {0, f->top, NULL, NULL};
    const int wide = 2 * reach_m + 1, total = (2 * reach_s + 1) * wide;
    float best = INFINITY;
    int best_s = 0, best_m = 0;
    for (int from = 0; from < total; from += CANDIDATES) {
        float s[CANDIDATES], m[CANDIDATES], errors[CANDIDATES];
        int si[CANDIDATES], mi[CANDIDATES];
        for (int c = 0; c < CANDIDATES; c++) {
            int k = from + c < total ? from + c : total - 1;
            si[c] = clamp_int(*scale - reach_s + k / wide, 0, f->limit);
            mi[c] = clamp_int(*min - reach_m + k % wide, 0, f->limit);
            s[c] = d * (float)si[c], m[c] = dmin * (float)mi[c];
        }
        errors_of(&g, x, w, f->group, s, m, errors);
        int at = lowest(errors);
        if (errors[at] < best) best = errors[at], best_s = si[at], best_m = mi[at];
    }
    *scale = best_s, *min = best_m;
    return best;
}

// False if float16 cannot hold them.
static inline bool store_pair(const block *b, float d, float dmin, affine_fit *fit) {
    return storable(b, d, &fit->dh, &fit->d) && storable(b, dmin, &fit->mh, &fit->dmin);
}

// Integer scales of all groups for the stored d and dmin, near those that are there.
INLINE void choose_pairs(const affine_format *f, const block *b, int reach_s, int reach_m,
                         affine_fit *fit) {
    fit->error = 0;
    for (int i = 0; i < 256 / f->group; i++) {
        fit->error += choose_pair(f, b->x + i * f->group, b->w + i * f->group, fit->d, fit->dmin,
                                  reach_s, reach_m, &fit->scale[i], &fit->min[i]);
    }
}

// Least squares for d and dmin, the integers given.
INLINE void refit_pair(const affine_format *f, const block *b, const affine_fit *fit, float *d,
                       float *dmin) {
    const grid g = {0, f->top, NULL, NULL};
    double ss = 0, sm = 0, mm = 0, xs = 0, xm = 0;
    for (int i = 0; i < 256 / f->group; i++) {
        const float *x = b->x + i * f->group, *w = b->w + i * f->group;
        float s = fit->d * (float)fit->scale[i], m = fit->dmin * (float)fit->min[i];
        uint8_t q[32];
        round_block(&g, x, f->group, s, m, q);
        double sw = 0, sq = 0, sqq = 0, sx = 0, sxq = 0;
        for (int k = 0; k < f->group; k++) {
            double wq = (double)w[k] * q[k], wx = (double)w[k] * x[k];
            sw += w[k], sq += wq, sqq += wq * q[k], sx += wx, sxq += wx * q[k];
        }
        double a = fit->scale[i], c = -fit->min[i];
        ss += a * a * sqq, sm += a * c * sq, mm += c * c * sw, xs += a * sxq, xm += c * sx;
    }
    double det = ss * mm - sm * sm;
    if (det > 1e-9 * ss * mm) {
        *d = (float)((xs * mm - xm * sm) / det), *dmin = (float)((xm * ss - xs * sm) / det);
    } else if (ss > 0) {
        *d = (float)(xs / ss), *dmin = 0;
    } else {
        *d = 0, *dmin = mm > 0 ? (float)(xm / mm) : 0;
    }
}

INLINE int fit_affine(const affine_format *f, const block *b, affine_block *out) {
    const grid g = {0, f->top, NULL, NULL};
    const int groups = 256 / f->group;
    line ideal[16];
    float smax = 0, mmax = 0;
    for (int i = 0; i < groups; i++) {
        ideal[i] = best_line(&g, b->x + i * f->group, b->w + i * f->group, f->group, true);
        smax = ideal[i].s > smax ? ideal[i].s : smax, mmax = ideal[i].m > mmax ? ideal[i].m : mmax;
    }
    affine_fit fit;
    float d = smax / (float)f->limit, dmin = mmax / (float)f->limit;
    if (!store_pair(b, d, dmin, &fit)) return QRT_BAD_SCALE;
    for (int i = 0; i < groups; i++) {
        fit.scale[i] = clamp_int((int)(ideal[i].s * reciprocal(fit.d) + 0.5f), 0, f->limit);
        fit.min[i] = clamp_int((int)(ideal[i].m * reciprocal(fit.dmin) + 0.5f), 0, f->limit);
    }
    choose_pairs(f, b, f->scales, f->mins, &fit);
    for (int round = 0; round < REFITS; round++) {
        affine_fit next = fit;
        refit_pair(f, b, &fit, &d, &dmin);
        if (!(d >= 0 && dmin >= 0) || !store_pair(b, d, dmin, &next)) break;
        choose_pairs(f, b, 1, 2, &next);
        if (next.error >= fit.error) break;
        fit = next;
    }
    out->d = fit.dh, out->dmin = fit.mh;
    for (int i = 0; i < groups; i++) {
        out->scale[i] = (uint8_t)fit.scale[i], out->min[i] = (uint8_t)fit.min[i];
        round_block(&g, b->x + i * f->group, f->group, fit.d * (float)fit.scale[i],
                    fit.dmin * (float)fit.min[i], out->q + i * f->group);
    }
    return QRT_OK;
}

// 8 scales and 8 minima of 6 bits in 12 bytes.
static void pack_pairs(const affine_block *a, uint8_t *out) {
    for (int i = 0; i < 4; i++) {
        out[i] = (uint8_t)(a->scale[i] | a->scale[i + 4] >> 4 << 6);
        out[i + 4] = (uint8_t)(a->min[i] | a->min[i + 4] >> 4 << 6);
        out[i + 8] = (uint8_t)((a->scale[i + 4] & 15) | (a->min[i + 4] & 15) << 4);
    }
}

static int q4_k_block(const block *b, uint8_t *out) {
    static const affine_format f = {32, 15, 63, 3, 4};
    affine_block a;
    if (fit_affine(&f, b, &a) != QRT_OK) return QRT_BAD_SCALE;
    put16(out, a.d), put16(out + 2, a.dmin);
    pack_pairs(&a, out + 4);
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 32; k++)
            out[16 + 32 * i + k] = (uint8_t)(a.q[64 * i + k] | a.q[64 * i + 32 + k] << 4);
    return QRT_OK;
}

static int q5_k_block(const block *b, uint8_t *out) {
    static const affine_format f = {32, 31, 63, 3, 4};
    affine_block a;
    if (fit_affine(&f, b, &a) != QRT_OK) return QRT_BAD_SCALE;
    put16(out, a.d), put16(out + 2, a.dmin);
    pack_pairs(&a, out + 4);
    for (int k = 0; k < 32; k++) {
        int high = 0;
        for (int i = 0; i < 8; i++) high |= a.q[32 * i + k] >> 4 << i;
        out[16 + k] = (uint8_t)high;
    }
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 32; k++)
            out[48 + 32 * i + k] =
                (uint8_t)((a.q[64 * i + k] & 15) | (a.q[64 * i + 32 + k] & 15) << 4);
    return QRT_OK;
}

static int q2_k_block(const block *b, uint8_t *out) {
    static const affine_format f = {16, 3, 15, 2, 2};
    affine_block a;
    if (fit_affine(&f, b, &a) != QRT_OK) return QRT_BAD_SCALE;
    for (int i = 0; i < 16; i++) out[i] = (uint8_t)(a.scale[i] | a.min[i] << 4);
    for (int h = 0; h < 2; h++)
        for (int k = 0; k < 32; k++) {
            const uint8_t *q = a.q + 128 * h + k;
            out[16 + 32 * h + k] = (uint8_t)(q[0] | q[32] << 2 | q[64] << 4 | q[96] << 6);
        }
    put16(out + 80, a.d), put16(out + 82, a.dmin);
    return QRT_OK;
}

static int q3_k_block(const block *b, uint8_t *out) {
    static const symmetric_format f = {16, -32, 31, 2.5f, 5.5f, 1, 1, 1};
    static const grid g = {-4, 3, NULL, NULL};
    symmetric_fit fit;
    if (!fit_scales(&f, &g, b, &fit)) return QRT_BAD_SCALE;
    uint8_t q[256];
    for (int i = 0; i < 16; i++)
        round_block(&g, b->x + 16 * i, 16, fit.d * (float)fit.scale[i], 0, q + 16 * i);
    memset(out, 0, 96 + 12);
    for (int k = 0; k < 256; k++) {
        int half = k / 128, part = k / 32 % 4, l = k % 32;
        out[l] |= (uint8_t)(q[k] >> 2 << (4 * half + part));
        out[32 + 32 * half + l] |= (uint8_t)((q[k] & 3) << 2 * part);
    }
    for (int i = 0; i < 16; i++) {
        int scale = fit.scale[i] + 32;
        out[96 + i % 8] |= (uint8_t)((scale & 15) << i / 8 * 4);
        out[104 + i % 4] |= (uint8_t)(scale >> 4 << i / 4 * 2);
    }
    put16(out + 108, fit.dh);
    return QRT_OK;
}

static int q6_k_block(const block *b, uint8_t *out) {
    static const symmetric_format f = {16, -128, 127, 28, 33, 1, 2, 1};
    static const grid g = {-32, 31, NULL, NULL};
    symmetric_fit fit;
    if (!fit_scales(&f, &g, b, &fit)) return QRT_BAD_SCALE;
    uint8_t q[256];
    for (int i = 0; i < 16; i++)
        round_block(&g, b->x + 16 * i, 16, fit.d * (float)fit.scale[i], 0, q + 16 * i);
    for (int h = 0; h < 2; h++)
        for (int l = 0; l < 32; l++) {
            const uint8_t *p = q + 128 * h + l;
            out[64 * h + l] = (uint8_t)((p[0] & 15) | (p[64] & 15) << 4);
            out[64 * h + 32 + l] = (uint8_t)((p[32] & 15) | (p[96] & 15) << 4);
            out[128 + 32 * h + l] =
                (uint8_t)(p[0] >> 4 | p[32] >> 4 << 2 | p[64] >> 4 << 4 | p[96] >> 4 << 6);
        }
    memcpy(out + 192, fit.scale, 16);
    put16(out + 208, fit.dh);
    return QRT_OK;
}

#define ROWS(NAME, name, BYTES)                                                                    \
    static int quantize_##name(const float *x, const float *importance, uint8_t *row, int64_t n) { \
        return quantize_row(x, importance, row, n, 256, BYTES, name##_block);                      \
    }
#define FORMATS(X)                                                                                 \
    X(Q2_K, q2_k, 84) X(Q3_K, q3_k, 110) X(Q4_K, q4_k, 144) X(Q5_K, q5_k, 176) X(Q6_K, q6_k, 210)
FORMATS(ROWS)

void QRT_FILL(quantize_k)(qrt_kernels *k);
void QRT_FILL(quantize_k)(qrt_kernels *k) {
#define SET(NAME, name, BYTES) k->quantize[QRT_##NAME] = quantize_##name;
    FORMATS(SET)
}

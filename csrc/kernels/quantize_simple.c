// Rows of float32 to the float formats and to the formats with one scale for 32 values.
#include "quantize_search.h"

static int quantize_f32(const float *x, const float *importance, uint8_t *row, int64_t n) {
    (void)importance;
    for (int64_t i = 0; i < n; i++)
        if (!(x[i] - x[i] == 0)) return QRT_BAD_VALUE;
    memcpy(row, x, (size_t)n * 4);
    return QRT_OK;
}

static int quantize_f16(const float *x, const float *importance, uint8_t *row, int64_t n) {
    (void)importance;
    for (int64_t i = 0; i < n; i++) {
        if (!(x[i] - x[i] == 0)) return QRT_BAD_VALUE;
        uint16_t h = half_of(x[i]);
        if ((h & 0x7fff) == 0x7c00) return QRT_BAD_SCALE;
        put16(row + 2 * i, h);
    }
    return QRT_OK;
}

static int quantize_bf16(const float *x, const float *importance, uint8_t *row, int64_t n) {
    (void)importance;
    for (int64_t i = 0; i < n; i++) {
        if (!(x[i] - x[i] == 0)) return QRT_BAD_VALUE;
        uint32_t u = bits_of(x[i]);
        u += 0x7fff + (u >> 16 & 1); // nearest even
        if ((u & 0x7f800000) == 0x7f800000) return QRT_BAD_SCALE;
        put16(row + 2 * i, (uint16_t)(u >> 16));
    }
    return QRT_OK;
}

// Writes d of a scale without minimum and the q, from 0 up.
INLINE int fit_symmetric(const grid *g, const block *b, float from, float to, int rounds, bool both,
                         int stride, uint8_t *out, uint8_t *q) {
    float s = best_scale(g, b->x, b->w, 32, from, to, rounds, both), stored;
    uint16_t h;
    if (!best_half(b, g, b->x, 32, s, stride, &h, &stored)) return QRT_BAD_SCALE;
    round_block(g, b->x, 32, stored, 0, q);
    put16(out, h);
    return QRT_OK;
}

// Writes d and m of value = d * q + m, and the q.
INLINE int fit_line(const grid *g, const block *b, uint8_t *out, uint8_t *q) {
    line l = best_line(g, b->x, b->w, 32, false);
    float s, m;
    uint16_t h;
    if (!storable(b, -l.m, &h, &m)) return QRT_BAD_SCALE;
    put16(out + 2, h);
    // Around the stored minimum the scale is searched anew.
    float shifted[32];
    for (int i = 0; i < 32; i++) shifted[i] = b->x[i] - m;
    if (!best_half(b, g, shifted, 32, l.s, 2, &h, &s)) return QRT_BAD_SCALE;
    put16(out, h);
    round_block(g, shifted, 32, s, 0, q);
    return QRT_OK;
}

static void pack_fifth_bits(const uint8_t *q, uint8_t *out) {
    uint32_t high = 0;
    for (int i = 0; i < 32; i++) high |= (uint32_t)(q[i] >> 4) << i;
    memcpy(out, &high, 4);
}

static int q8_0_block(const block *b, uint8_t *out) {
    // -128 is left out: kernels that take |q| as int8 cannot hold it.
    static const grid g = {-127, 127, NULL, NULL};
    uint8_t q[32];
    if (fit_symmetric(&g, b, 118, 128, 2, false, 1, out, q) != QRT_OK) return QRT_BAD_SCALE;
    for (int i = 0; i < 32; i++) out[2 + i] = (uint8_t)(q[i] - 127);
    return QRT_OK;
}

static int q4_0_block(const block *b, uint8_t *out) {
    static const grid g = {-8, 7, NULL, NULL};
    uint8_t q[32];
    if (fit_symmetric(&g, b, 6, 10, 2, true, 2, out, q) != QRT_OK) return QRT_BAD_SCALE;
    pack_nibbles(q, out + 2);
    return QRT_OK;
}

static int q5_0_block(const block *b, uint8_t *out) {
    static const grid g = {-16, 15, NULL, NULL};
    uint8_t q[32];
    if (fit_symmetric(&g, b, 13, 18, 2, true, 2, out, q) != QRT_OK) return QRT_BAD_SCALE;
    pack_fifth_bits(q, out + 2), pack_nibbles(q, out + 6);
    return QRT_OK;
}

static int q4_1_block(const block *b, uint8_t *out) {
    static const grid g = {0, 15, NULL, NULL};
    uint8_t q[32];
    if (fit_line(&g, b, out, q) != QRT_OK) return QRT_BAD_SCALE;
    pack_nibbles(q, out + 4);
    return QRT_OK;
}

static int q5_1_block(const block *b, uint8_t *out) {
    static const grid g = {0, 31, NULL, NULL};
    uint8_t q[32];
    if (fit_line(&g, b, out, q) != QRT_OK) return QRT_BAD_SCALE;
    pack_fifth_bits(q, out + 4), pack_nibbles(q, out + 8);
    return QRT_OK;
}

#define ROWS(NAME, name, BYTES)                                                                    \
    static int quantize_##name(const float *x, const float *importance, uint8_t *row, int64_t n) { \
        return quantize_row(x, importance, row, n, 32, BYTES, name##_block);                       \
    }
#define FORMATS(X)                                                                                 \
    X(Q8_0, q8_0, 34) X(Q4_0, q4_0, 18) X(Q4_1, q4_1, 20) X(Q5_0, q5_0, 22) X(Q5_1, q5_1, 24)
FORMATS(ROWS)

void QRT_FILL(quantize_simple)(qrt_kernels *k);
void QRT_FILL(quantize_simple)(qrt_kernels *k) {
    k->quantize[QRT_F32] = quantize_f32;
    k->quantize[QRT_F16] = quantize_f16;
    k->quantize[QRT_BF16] = quantize_bf16;
#define SET(NAME, name, BYTES) k->quantize[QRT_##NAME] = quantize_##name;
    FORMATS(SET)
}

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

static int q8_0_block(const block *b, uint8_t *out) {
    // -128 is left out: kernels that take |q| as int8 cannot hold it.
    static const grid g = {-127, 127, NULL, NULL};
    float s = best_scale(&g, b->x, b->w, 32, 118, 128, 2, false), stored;
    uint16_t h;
    if (!best_half(b, &g, 32, s, 1, &h, &stored)) return QRT_BAD_SCALE;
    uint8_t q[32];
    round_block(&g, b->x, 32, stored, 0, q);
    put16(out, h);
    for (int i = 0; i < 32; i++) out[2 + i] = (uint8_t)(q[i] - 127);
    return QRT_OK;
}

static int q4_0_block(const block *b, uint8_t *out) {
    static const grid g = {-8, 7, NULL, NULL};
    float s = best_scale(&g, b->x, b->w, 32, 6, 10, 2, true), stored;
    uint16_t h;
    if (!best_half(b, &g, 32, s, 2, &h, &stored)) return QRT_BAD_SCALE;
    uint8_t q[32];
    round_block(&g, b->x, 32, stored, 0, q);
    put16(out, h);
    pack_nibbles(q, out + 2);
    return QRT_OK;
}

// n is a whole number of blocks.
#define ROWS(name, ELEMENTS, BYTES)                                                                \
    static int quantize_##name(const float *x, const float *importance, uint8_t *row, int64_t n) { \
        if (check_finite(x, n) != QRT_OK) return QRT_BAD_VALUE;                                    \
        for (int64_t at = 0; at < n; at += ELEMENTS, row += BYTES) {                               \
            block b;                                                                               \
            if (!load_block(&b, x + at, importance ? importance + at : NULL, ELEMENTS)) {          \
                name##_zero(row);                                                                  \
                continue;                                                                          \
            }                                                                                      \
            int status = name##_block(&b, row);                                                    \
            if (status != QRT_OK) return status;                                                   \
        }                                                                                          \
        return QRT_OK;                                                                             \
    }
static void q8_0_zero(uint8_t *row) { memset(row, 0, 34); }
static void q4_0_zero(uint8_t *row) { memset(row, 0, 2), memset(row + 2, 0x88, 16); }
ROWS(q8_0, 32, 34)
ROWS(q4_0, 32, 18)

void QRT_FILL(quantize_simple)(qrt_kernels *k);
void QRT_FILL(quantize_simple)(qrt_kernels *k) {
    k->quantize[QRT_F32] = quantize_f32;
    k->quantize[QRT_F16] = quantize_f16;
    k->quantize[QRT_BF16] = quantize_bf16;
    k->quantize[QRT_Q4_0] = quantize_q4_0;
    k->quantize[QRT_Q8_0] = quantize_q8_0;
}

// Rows of float32 to the 4-bit formats whose values come from a table.
#include "quantize_search.h"

static const float iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};
static const float iq4_middles[15] = {-115.5f, -93.5f, -74,   -57,   -42, -28.5f, -16, -4.5f,
                                      7,       19,     31.5f, 45.5f, 61,  79,     101};
static const grid iq4 = {-127, 113, iq4_values, iq4_middles};

static int iq4_nl_block(const block *b, uint8_t *out) {
    float s = best_scale(&iq4, b->x, b->w, 32, 90, 135, 1, true), stored;
    uint16_t h;
    if (!best_half(b, &iq4, b->x, 32, s, 8, &h, &stored)) return QRT_BAD_SCALE;
    uint8_t q[32];
    round_block(&iq4, b->x, 32, stored, 0, q);
    put16(out, h);
    pack_nibbles(q, out + 2);
    return QRT_OK;
}

static int iq4_xs_block(const block *b, uint8_t *out) {
    static const symmetric_format f = {32, -32, 31, 90, 135, 1, 1, 0};
    symmetric_fit fit;
    if (!fit_scales(&f, &iq4, b, &fit)) return QRT_BAD_SCALE;
    memset(out, 0, 8);
    uint32_t high = 0;
    for (int i = 0; i < 8; i++) {
        uint8_t q[32];
        round_block(&iq4, b->x + 32 * i, 32, fit.d * (float)fit.scale[i], 0, q);
        pack_nibbles(q, out + 8 + 16 * i);
        int scale = fit.scale[i] + 32;
        out[4 + i / 2] |= (uint8_t)((scale & 15) << i % 2 * 4);
        high |= (uint32_t)(scale >> 4) << 2 * i;
    }
    put16(out, fit.dh), put16(out + 2, (uint16_t)high);
    return QRT_OK;
}

// E2M1 doubled, in rising order; bit 3 of the code is the sign, and zero has two codes.
static const float fp4_values[16] = {-12, -8, -6, -4, -3, -2, -1, 0, 0, 1, 2, 3, 4, 6, 8, 12};
static const float fp4_middles[15] = {-10,  -7,   -5,   -3.5f, -2.5f, -1.5f, -0.5f, 0,
                                      0.5f, 1.5f, 2.5f, 3.5f,  5,     7,     10};
static const grid fp4 = {-12, 12, fp4_values, fp4_middles};

static int mxfp4_block(const block *b, uint8_t *out) {
    static const float none[CANDIDATES] = {0};
    float s[CANDIDATES], errors[CANDIDATES];
    // max |x| is in [1, 2): 2^-3 reaches it, smaller scales cut it off.
    for (int c = 0; c < CANDIDATES; c++) s[c] = 0.5f / (float)(1 << c);
    errors_of(&fp4, b->x, b->w, 32, s, none, errors);
    if (b->unit >= 0x1p126f) return QRT_BAD_SCALE; // rounded up, x would not be finite
    const int at = lowest(errors);
    const int e = (int)(bits_of(b->unit) >> 23) - at; // 2^(e - 128) = unit * s[at]
    uint8_t q[32], code[32];
    round_block(&fp4, b->x, 32, s[at], 0, q);
    // No q is 7: a zero counts as the higher of the two.
    for (int i = 0; i < 32; i++) code[i] = (uint8_t)(q[i] >= 8 ? q[i] - 8 : 15 - q[i]);
    out[0] = (uint8_t)e;
    pack_nibbles(code, out + 1);
    return QRT_OK;
}

#define ROWS(NAME, name, ELEMENTS, BYTES)                                                          \
    static int quantize_##name(const float *x, const float *importance, uint8_t *row, int64_t n) { \
        return quantize_row(x, importance, row, n, ELEMENTS, BYTES, name##_block);                 \
    }
#define FORMATS(X) X(IQ4_NL, iq4_nl, 32, 18) X(IQ4_XS, iq4_xs, 256, 136) X(MXFP4, mxfp4, 32, 17)
FORMATS(ROWS)

void QRT_FILL(quantize_iq4)(qrt_kernels *k);
void QRT_FILL(quantize_iq4)(qrt_kernels *k) {
#define SET(NAME, name, ELEMENTS, BYTES) k->quantize[QRT_##NAME] = quantize_##name;
    FORMATS(SET)
}

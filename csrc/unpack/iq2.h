// Rows of 8 positive grid values with a sign each.
// IQ2_XXS: d, for 32 elements 4 grid bytes and a word (4 x 7 sign bits, a scale of 4 bits).
// IQ2_XS: d, u16[32] (9 grid bits, 7 sign bits), scales[8]. IQ2_S: d, qs[32], signs[32], qh[8],
// scales[8].
#ifndef QRT_UNPACK_IQ2_H
#define QRT_UNPACK_IQ2_H
#include "common.h"
#include "grids.h"

INLINE void iq2_scales(float d, const uint8_t *scales, float *s, float *m) {
    for (int g = 0; g < 16; g++) {
        s[g] = d * (0.5f + (float)(scales[g / 2] >> 4 * (g % 2) & 15)) * 0.25f;
        m[g] = 0;
    }
}

INLINE void unpack_iq2_xxs(const uint8_t *block, uint8_t *q, float *s, float *m) {
    float d = qrt_half(block);
    for (int i = 0; i < 8; i++) {
        const uint8_t *rows = block + 2 + 8 * i;
        uint32_t word = qrt_u32(rows + 4);
        s[i] = d * (0.5f + (float)(word >> 28)) * 0.25f;
        m[i] = 0;
        for (int k = 0; k < 4; k++) {
            store_signed(iq2_xxs_grid[rows[k]], even_signs(word >> 7 * k), q + 32 * i + 8 * k);
        }
    }
}

INLINE void unpack_iq2_xs(const uint8_t *block, uint8_t *q, float *s, float *m) {
    iq2_scales(qrt_half(block), block + 66, s, m);
    for (int i = 0; i < 32; i++) {
        uint32_t word = qrt_u16(block + 2 + 2 * i);
        store_signed(iq2_xs_grid[word & 511], even_signs(word >> 9), q + 8 * i);
    }
}

INLINE void unpack_iq2_s(const uint8_t *block, uint8_t *q, float *s, float *m) {
    iq2_scales(qrt_half(block), block + 74, s, m);
    for (int i = 0; i < 32; i++) {
        int index = block[2 + i] | (block[66 + i / 4] >> 2 * (i % 4) & 3) << 8;
        store_signed(iq2_s_grid[index], block[34 + i], q + 8 * i);
    }
}
#endif

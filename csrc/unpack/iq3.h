// Rows of 4 positive grid values with a sign each.
// IQ3_XXS: d, qs[64], u32[8] (for 32 elements: 4 x 7 sign bits, a scale of 4 bits).
// IQ3_S: d, qs[64], qh[8], signs[32], scales[4].
#ifndef QRT_UNPACK_IQ3_H
#define QRT_UNPACK_IQ3_H
#include "common.h"
#include "grids.h"

INLINE void unpack_iq3_xxs(const uint8_t *block, uint8_t *q, float *s, float *m) {
    float d = qrt_half(block);
    for (int i = 0; i < 8; i++) {
        const uint8_t *rows = block + 2 + 8 * i;
        uint32_t word = qrt_u32(block + 66 + 4 * i);
        s[i] = d * (0.5f + (float)(word >> 28)) * 0.5f;
        m[i] = 0;
        for (int k = 0; k < 4; k++) {
            uint64_t grid = iq3_xxs_grid[rows[2 * k]] | (uint64_t)iq3_xxs_grid[rows[2 * k + 1]]
                                                            << 32;
            store_signed(grid, even_signs(word >> 7 * k), q + 32 * i + 8 * k);
        }
    }
}

INLINE void unpack_iq3_s(const uint8_t *block, uint8_t *q, float *s, float *m) {
    float d = qrt_half(block);
    for (int i = 0; i < 8; i++) {
        const uint8_t *rows = block + 2 + 8 * i;
        int qh = block[66 + i];
        s[i] = d * (float)(1 + 2 * (block[106 + i / 2] >> 4 * (i % 2) & 15));
        m[i] = 0;
        for (int k = 0; k < 4; k++) {
            uint64_t low = iq3_s_grid[rows[2 * k] | (qh >> 2 * k & 1) << 8];
            uint64_t high = iq3_s_grid[rows[2 * k + 1] | (qh >> (2 * k + 1) & 1) << 8];
            store_signed(low | high << 32, block[74 + 4 * i + k], q + 32 * i + 8 * k);
        }
    }
}
#endif

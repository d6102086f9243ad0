// Rows of 8 grid values, all shifted by +-1/8: q is 8 times that, the scale an eighth.
// IQ1_S: d, qs[32], qh u16[8] (for 32 elements: 4 x 3 upper grid bits, a scale of 3 bits, the sign
// of the shift). IQ1_M: qs[32], qh[16] (for 8 elements: 3 upper grid bits, the sign), scales u16[4]
// (for 64 elements: 4 x 3 bits; their top nibbles together are the float16 d).
#ifndef QRT_UNPACK_IQ1_H
#define QRT_UNPACK_IQ1_H
#include "common.h"
#include "grids.h"

INLINE void store_shifted(uint64_t grid, int negative, uint8_t *q) {
    uint8_t row[8];
    memcpy(row, &grid, 8);
    for (int i = 0; i < 8; i++) q[i] = (uint8_t)(row[i] + (negative ? 255 : 1));
}

INLINE void unpack_iq1_s(const uint8_t *block, uint8_t *q, float *s, float *m) {
    float d = qrt_half(block);
    for (int i = 0; i < 8; i++) {
        int qh = qrt_u16(block + 34 + 2 * i);
        s[i] = d * (float)(2 * (qh >> 12 & 7) + 1) * 0.125f;
        m[i] = 0;
        for (int k = 0; k < 4; k++) {
            int index = block[2 + 4 * i + k] | (qh >> 3 * k & 7) << 8;
            store_shifted(iq1_grid[index], qh >> 15, q + 32 * i + 8 * k);
        }
    }
}

INLINE void unpack_iq1_m(const uint8_t *block, uint8_t *q, float *s, float *m) {
    const uint8_t *scales = block + 48;
    uint64_t all = u64_at(scales);
    uint16_t bits = (uint16_t)((all >> 12 & 0xf) | (all >> 24 & 0xf0) | (all >> 36 & 0xf00) |
                               (all >> 48 & 0xf000));
    float d = qrt_half((const uint8_t *)&bits);
    for (int g = 0; g < 16; g++) {
        s[g] = d * (float)(2 * (qrt_u16(scales + 2 * (g / 4)) >> 3 * (g % 4) & 7) + 1) * 0.125f;
        m[g] = 0;
    }
    for (int i = 0; i < 32; i++) {
        int qh = block[32 + i / 2] >> 4 * (i % 2) & 15;
        store_shifted(iq1_grid[block[i] | (qh & 7) << 8], qh >> 3, q + 8 * i);
    }
}
#endif

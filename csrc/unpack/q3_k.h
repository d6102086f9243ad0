// Q3_K: hmask[32], qs[64], scales[12], d. qs as in Q2_K; bit p of hmask is bit 2 of the elements of
// plane p. 16 scales of six bits: low nibbles in scales[0..7], upper two bits in scales[8..11].
#ifndef QRT_UNPACK_Q3_K_H
#define QRT_UNPACK_Q3_K_H
#include "common.h"

INLINE void unpack_q3_k(const uint8_t *block, uint8_t *q, float *s, float *m) {
    const uint8_t *scales = block + 96;
    float d = qrt_half(block + 108);
    for (int g = 0; g < 16; g++) {
        int low = g < 8 ? scales[g] & 15 : scales[g - 8] >> 4;
        int high = scales[8 + g % 4] >> 2 * (g / 4) & 3;
        s[g] = d * (float)((low | high << 4) - 32);
        m[g] = 0;
    }
    for (int plane = 0; plane < 8; plane++) {
        const uint8_t *qs = block + 32 + 32 * (plane / 4);
        for (int i = 0; i < 32; i++) {
            q[32 * plane + i] =
                (uint8_t)((qs[i] >> 2 * (plane % 4) & 3) | (block[i] >> plane & 1) << 2);
        }
    }
}
#endif

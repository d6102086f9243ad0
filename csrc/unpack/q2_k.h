// Q2_K: scales[16], qs[64], d, dmin. Each 32 bytes of qs hold four planes of 32 elements, two bits
// each; a scale byte covers 16 elements: low nibble times d is the scale, high nibble times dmin
// the minimum.
#ifndef QRT_UNPACK_Q2_K_H
#define QRT_UNPACK_Q2_K_H
#include "common.h"

INLINE void unpack_q2_k(const uint8_t *block, uint8_t *q, float *s, float *m) {
    float d = qrt_half(block + 80), dmin = qrt_half(block + 82);
    for (int g = 0; g < 16; g++) {
        s[g] = d * (float)(block[g] & 15);
        m[g] = dmin * (float)(block[g] >> 4);
    }
    for (int plane = 0; plane < 8; plane++) {
        const uint8_t *qs = block + 16 + 32 * (plane / 4);
        for (int i = 0; i < 32; i++) q[32 * plane + i] = qs[i] >> 2 * (plane % 4) & 3;
    }
}
#endif

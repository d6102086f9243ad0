// Q4_K: d, dmin, scales[12], qs[128]. Q5_K: d, dmin, scales[12], qh[32], qs[128].
// Each 32 bytes of qs hold two sub-blocks of 32 elements, low nibbles first; bit i of qh is bit 4
// in sub-block i.
#ifndef QRT_UNPACK_Q4_K_H
#define QRT_UNPACK_Q4_K_H
#include "common.h"

// Eight scales and eight minima of six bits: the first four of each are whole bytes' low parts, the
// others' low nibbles are in bytes 8..11 and their upper two bits on top of bytes 0..7.
INLINE void k_scales(const uint8_t *block, float *s, float *m) {
    float d = qrt_half(block), dmin = qrt_half(block + 2);
    const uint8_t *scales = block + 4;
    for (int i = 0; i < 4; i++) {
        s[i] = d * (float)(scales[i] & 63);
        m[i] = dmin * (float)(scales[i + 4] & 63);
        s[i + 4] = d * (float)((scales[i + 8] & 15) | scales[i] >> 6 << 4);
        m[i + 4] = dmin * (float)(scales[i + 8] >> 4 | scales[i + 4] >> 6 << 4);
    }
}

INLINE void unpack_q4_k(const uint8_t *block, uint8_t *q, float *s, float *m) {
    k_scales(block, s, m);
    for (int i = 0; i < 4; i++) split_nibbles(block + 16 + 32 * i, 32, q + 64 * i);
}

INLINE void unpack_q5_k(const uint8_t *block, uint8_t *q, float *s, float *m) {
    k_scales(block, s, m);
    for (int i = 0; i < 4; i++) split_nibbles(block + 48 + 32 * i, 32, q + 64 * i);
    for (int i = 0; i < 8; i++) {
        for (int j = 0; j < 32; j++) q[32 * i + j] |= (uint8_t)((block[16 + j] >> i & 1) << 4);
    }
}
#endif

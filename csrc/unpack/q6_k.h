// Q6_K: ql[128], qh[64], int8 scales[16], d. Half a block is 64 bytes of ql and 32 of qh: elements
// 0..31 and 32..63 are the low nibbles of ql, 64..95 and 96..127 the high ones; bits 2k of qh are
// the upper two of the k-th 32 elements.
#ifndef QRT_UNPACK_Q6_K_H
#define QRT_UNPACK_Q6_K_H
#include "common.h"

INLINE void unpack_q6_k(const uint8_t *block, uint8_t *q, float *s, float *m) {
    float d = qrt_half(block + 208);
    for (int g = 0; g < 16; g++) {
        s[g] = d * (float)(int8_t)block[192 + g];
        m[g] = 0;
    }
    for (int half = 0; half < 2; half++) {
        const uint8_t *ql = block + 64 * half, *qh = block + 128 + 32 * half;
        uint8_t *to = q + 128 * half;
        split_nibbles(ql, 64, to);
        for (int k = 0; k < 4; k++) {
            for (int i = 0; i < 32; i++) to[32 * k + i] |= (uint8_t)((qh[i] >> 2 * k & 3) << 4);
        }
    }
}
#endif

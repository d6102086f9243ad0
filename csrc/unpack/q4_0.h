// Q4_0: d, qs[16]. Q4_1: d, m, qs[16]. Low nibbles are elements 0..15, high nibbles 16..31.
#ifndef QRT_UNPACK_Q4_0_H
#define QRT_UNPACK_Q4_0_H
#include "common.h"

INLINE void unpack_q4_0(const uint8_t *block, uint8_t *q, float *s, float *m) {
    *s = qrt_half(block);
    *m = 0;
    split_nibbles(block + 2, 16, q);
}

INLINE void unpack_q4_1(const uint8_t *block, uint8_t *q, float *s, float *m) {
    *s = qrt_half(block);
    *m = -qrt_half(block + 2);
    split_nibbles(block + 4, 16, q);
}
#endif

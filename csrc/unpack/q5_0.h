// Q5_0: d, qh u32, qs[16]. Q5_1: d, m, qh u32, qs[16]. As Q4, with bit 4 of element j in bit j of
// qh.
#ifndef QRT_UNPACK_Q5_0_H
#define QRT_UNPACK_Q5_0_H
#include "common.h"

INLINE void unpack_q5_0(const uint8_t *block, uint8_t *q, float *s, float *m) {
    *s = qrt_half(block);
    *m = 0;
    split_nibbles(block + 6, 16, q);
    add_fifth_bits(qrt_u32(block + 2), q);
}

INLINE void unpack_q5_1(const uint8_t *block, uint8_t *q, float *s, float *m) {
    *s = qrt_half(block);
    *m = -qrt_half(block + 2);
    split_nibbles(block + 8, 16, q);
    add_fifth_bits(qrt_u32(block + 4), q);
}
#endif

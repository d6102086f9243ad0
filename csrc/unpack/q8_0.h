// Q8_0: d, int8 qs[32].
#ifndef QRT_UNPACK_Q8_0_H
#define QRT_UNPACK_Q8_0_H
#include "common.h"

INLINE void unpack_q8_0(const uint8_t *block, uint8_t *q, float *s, float *m) {
    *s = qrt_half(block);
    *m = 0;
    memcpy(q, block + 2, 32);
}
#endif

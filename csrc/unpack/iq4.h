// Nibbles that index a table of 16. IQ4_NL: d, qs[16]. IQ4_XS: d, scales_h u16, scales_l[4],
// qs[128].
#ifndef QRT_UNPACK_IQ4_H
#define QRT_UNPACK_IQ4_H
#include "common.h"

INLINE void unpack_iq4_nl(const uint8_t *block, uint8_t *q, float *s, float *m) {
    *s = qrt_half(block);
    *m = 0;
    lookup_nibbles(iq4_values, block + 2, 16, q);
}

INLINE void unpack_iq4_xs(const uint8_t *block, uint8_t *q, float *s, float *m) {
    float d = qrt_half(block);
    int high = qrt_u16(block + 2);
    for (int i = 0; i < 8; i++) {
        int scale = (block[4 + i / 2] >> 4 * (i % 2) & 15) | (high >> 2 * i & 3) << 4;
        s[i] = d * (float)(scale - 32);
        m[i] = 0;
        lookup_nibbles(iq4_values, block + 8 + 16 * i, 16, q + 32 * i);
    }
}
#endif

// Pieces that several formats share. unpack_<format> turns one block into integers and scales:
//     value[i] = s[i / GROUP] * (q[i] - OFF) - m[i / GROUP]
// q in the order of the elements; formats of 8 bits store int8 in q. The products are formed in
// ggml's order of float32 operations, so that values are bit-exact when the compiler does not fuse
// multiply and subtract.
#ifndef QRT_UNPACK_COMMON_H
#define QRT_UNPACK_COMMON_H
#include "../kernels/kernels.h"

static const int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};
static const int8_t fp4_values[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                      0, -1, -2, -3, -4, -6, -8, -12}; // doubled

INLINE uint64_t u64_at(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

INLINE float float_of_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

INLINE void zero_floats(float *m, int n) {
    for (int i = 0; i < n; i++) m[i] = 0;
}

// n bytes to 2 n values: low nibbles first, then high nibbles.
INLINE void split_nibbles(const uint8_t *p, int n, uint8_t *q) {
    for (int i = 0; i < n; i++) q[i] = p[i] & 15;
    for (int i = 0; i < n; i++) q[i + n] = p[i] >> 4;
}

// As split_nibbles, through a table of 16.
INLINE void lookup_nibbles(const int8_t *values, const uint8_t *p, int n, uint8_t *q) {
    for (int i = 0; i < n; i++) q[i] = (uint8_t)values[p[i] & 15];
    for (int i = 0; i < n; i++) q[i + n] = (uint8_t)values[p[i] >> 4];
}

// Bit i of bits becomes bit 4 of q[i], for 32 values.
INLINE void add_fifth_bits(uint32_t bits, uint8_t *q) {
    for (int i = 0; i < 32; i++) q[i] |= (uint8_t)((bits >> i & 1) << 4);
}

// 8 positive bytes of a grid, those negated whose bit in signs is set. Byte by byte in a word: -g
// is ~g + 1, and no byte carries into the next because g is not 0.
INLINE void store_signed(uint64_t grid, uint32_t signs, uint8_t *q) {
    uint64_t bit = (signs & 255) * 0x0101010101010101u & 0x8040201008040201u;
    uint64_t set =
        (((bit & 0x7f7f7f7f7f7f7f7fu) + 0x7f7f7f7f7f7f7f7fu) | bit) >> 7 & 0x0101010101010101u;
    uint64_t v = (grid ^ set * 255) + set;
    memcpy(q, &v, 8);
}

// 7 sign bits; the eighth makes their number even.
INLINE uint32_t even_signs(uint32_t bits) {
    bits &= 127;
    return bits | (uint32_t)__builtin_parity(bits) << 7;
}
#endif

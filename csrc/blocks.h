// Weight formats of a GGUF file: the one list, and the traits that kernels are instantiated from.
#ifndef QRT_BLOCKS_H
#define QRT_BLOCKS_H
#include <stdint.h>
#include <string.h>

// X(NAME, name, id in the file, elements of a block, bytes of a block)
#define QRT_FLOAT_FORMATS(X)                                                                       \
    X(F32, f32, 0, 1, 4)                                                                           \
    X(F16, f16, 1, 1, 2)                                                                           \
    X(BF16, bf16, 30, 1, 2)

// X(NAME, name, id, elements, bytes, BITS, GROUP, OFF)
// A block unpacks to integers q and, per GROUP (16 or 32) elements, scales s and minima m:
//     value = s * (q - OFF) - m
// BITS 4, 5, 6: q is unsigned and below 2^BITS; BITS 8: q is signed (-128..127) and OFF is 0.
#define QRT_QUANT_FORMATS(X)                                                                       \
    X(Q4_0, q4_0, 2, 32, 18, 4, 32, 8)                                                             \
    X(Q4_1, q4_1, 3, 32, 20, 4, 32, 0)                                                             \
    X(Q5_0, q5_0, 6, 32, 22, 5, 32, 16)                                                            \
    X(Q5_1, q5_1, 7, 32, 24, 5, 32, 0)                                                             \
    X(Q8_0, q8_0, 8, 32, 34, 8, 32, 0)                                                             \
    X(Q2_K, q2_k, 10, 256, 84, 4, 16, 0)                                                           \
    X(Q3_K, q3_k, 11, 256, 110, 4, 16, 4)                                                          \
    X(Q4_K, q4_k, 12, 256, 144, 4, 32, 0)                                                          \
    X(Q5_K, q5_k, 13, 256, 176, 5, 32, 0)                                                          \
    X(Q6_K, q6_k, 14, 256, 210, 6, 16, 32)                                                         \
    X(IQ2_XXS, iq2_xxs, 16, 256, 66, 8, 32, 0)                                                     \
    X(IQ2_XS, iq2_xs, 17, 256, 74, 8, 16, 0)                                                       \
    X(IQ3_XXS, iq3_xxs, 18, 256, 98, 8, 32, 0)                                                     \
    X(IQ1_S, iq1_s, 19, 256, 50, 8, 32, 0)                                                         \
    X(IQ4_NL, iq4_nl, 20, 32, 18, 8, 32, 0)                                                        \
    X(IQ3_S, iq3_s, 21, 256, 110, 8, 32, 0)                                                        \
    X(IQ2_S, iq2_s, 22, 256, 82, 8, 16, 0)                                                         \
    X(IQ4_XS, iq4_xs, 23, 256, 136, 8, 32, 0)                                                      \
    X(IQ1_M, iq1_m, 29, 256, 56, 8, 16, 0)                                                         \
    X(TQ1_0, tq1_0, 34, 256, 54, 4, 32, 1)                                                         \
    X(TQ2_0, tq2_0, 35, 256, 66, 4, 32, 1)                                                         \
    X(MXFP4, mxfp4, 39, 32, 17, 8, 32, 0)                                                          \
    X(NVFP4, nvfp4, 40, 64, 36, 8, 16, 0)

enum {
#define X(NAME, ...) QRT_##NAME,
    QRT_FLOAT_FORMATS(X) QRT_QUANT_FORMATS(X)
#undef X
        QRT_N_FORMATS
};

static inline float qrt_half(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023, u;
    if (e == 31) {
        u = 0x7f800000u | m << 13;
    } else if (e) {
        u = (e + 112) << 23 | m << 13;
    } else { // subnormal: m * 2^-24, exact in float32
        float f = (float)m * 0x1p-24f;
        memcpy(&u, &f, 4);
    }
    u |= sign;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline uint16_t qrt_u16(const uint8_t *p) {
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}

static inline uint32_t qrt_u32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}
#endif

// Rows of any weight format to float32.
#include "kernels.h"
#include "../unpack/unpack.h"

static void dequantize_f32(const uint8_t *row, float *out, int64_t n) {
    memcpy(out, row, (size_t)n * 4);
}

static void dequantize_f16(const uint8_t *row, float *out, int64_t n) {
    int64_t i = 0;
    for (; i + QF <= n; i += QF) qf_store(out + i, qf_from_f16((const uint16_t *)(row + 2 * i)));
    for (; i < n; i++) out[i] = qrt_half(row + 2 * i);
}

static void dequantize_bf16(const uint8_t *row, float *out, int64_t n) {
    int64_t i = 0;
    for (; i + QF <= n; i += QF) qf_store(out + i, qf_from_bf16((const uint16_t *)(row + 2 * i)));
    for (; i < n; i++) out[i] = float_of_bits((uint32_t)qrt_u16(row + 2 * i) << 16);
}

// value = s * (q - OFF) - m; n is a whole number of blocks.
#define X(NAME, name, id, ELEMENTS, BYTES, BITS, GROUP, OFF)                                       \
    static void dequantize_##name(const uint8_t *row, float *out, int64_t n) {                     \
        for (int64_t at = 0; at < n; at += ELEMENTS, row += BYTES) {                               \
            uint8_t q[ELEMENTS];                                                                   \
            float s[ELEMENTS / GROUP], m[ELEMENTS / GROUP];                                        \
            unpack_##name(row, q, s, m);                                                           \
            for (int g = 0; g < ELEMENTS / GROUP; g++) {                                           \
                for (int i = GROUP * g; i < GROUP * (g + 1); i++) {                                \
                    int v = BITS == 8 ? (int8_t)q[i] : q[i] - OFF;                                 \
                    out[at + i] = s[g] * (float)v - m[g];                                          \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }
QRT_QUANT_FORMATS(X)
#undef X

void QRT_FILL(dequantize)(qrt_kernels *k);
void QRT_FILL(dequantize)(qrt_kernels *k) {
#define X(NAME, name, ...) k->dequantize[QRT_##NAME] = dequantize_##name;
    QRT_FLOAT_FORMATS(X)
    QRT_QUANT_FORMATS(X)
#undef X
}

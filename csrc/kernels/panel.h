// A panel: NR rows of a quantised matrix by up to 256 columns, unpacked and interleaved for
// products along the columns.
//     value of (row r, column c) = s[c / GROUP][r] * (q[c / 4][r][c % 4] - off) - m[c / GROUP][r]
// A format has an off, minima m, or neither: 8 bits, which are int8 where all other q are unsigned.
// Products of unsigned x signed bytes want more of them: at AVX-512 q is int8 + 128, their off; at
// AVX2, where that would overflow, q is |int8| and behind it int8, [columns / 4][2][NR][4], so that
// the sign can go to x.
#ifndef QRT_PANEL_H
#define QRT_PANEL_H
#include "product.h"
#include "../simd/words.h"
#include "../unpack/unpack.h"

typedef struct {
    uint8_t *q;                       // [columns / 4][PARTS][NR][4]
    float *s, *m;                     // [columns / GROUP][NR]
    const uint8_t *ahead, *ahead_end; // what will be packed next, NULL: unknown; only prefetched
} panel;

#if QF == 16
#    define NR 32
#else
#    define NR 16
#endif

#ifdef QRT_LEVEL_AVX2
#    define PARTS(bits) ((bits) == 8 ? 2 : 1) // of q
#else
#    define PARTS(bits) 1
#endif

// Words and scales of QF rows at index k, g along the columns; to: the panel from the first of
// these rows on.
INLINE void store_q(const panel *to, int k, wv q) { wv_store(to->q + (size_t)k * NR * 4, q); }
INLINE void store_int8(const panel *to, int k, wv q) {
#ifdef QRT_LEVEL_AVX2
    store_q(to, 2 * k, (wv)_mm256_abs_epi8((__m256i)q));
    store_q(to, 2 * k + 1, q);
#else
    store_q(to, k, INT8_OFF ? q ^ 0x80808080u : q);
#endif
}
INLINE void store_s(const panel *to, int g, qf s) { qf_store(to->s + g * NR, s); }
INLINE void store_s_m(const panel *to, int g, qf s, qf m) {
    qf_store(to->s + g * NR, s);
    qf_store(to->m + g * NR, m);
}

// pack_<format>(src, stride, nb, to): nb x 32 columns of QF rows, stride bytes apart, to QF lanes
// of a panel.
#include "pack.h"

// Any format by way of unpack_<format>: each row to a line of its own, then words of the lines into
// lanes.
#define PACK_BY_LINES(name)                                                                        \
    INLINE void pack_##name(const uint8_t *src, int64_t stride, int nb, const panel *to) {         \
        enum { GROUP = name##_group, GROUPS = 256 / GROUP };                                       \
        _Alignas(64) uint8_t q[QF * 256];                                                          \
        _Alignas(64) float s[QF * GROUPS], m[QF * GROUPS];                                         \
        for (int r = 0; r < QF; r++) {                                                             \
            const uint8_t *block = src + r * stride;                                               \
            for (int c = 0; c < nb * 32; c += name##_elements, block += name##_bytes) {            \
                const int g = r * GROUPS + c / GROUP;                                              \
                unpack_##name(block, q + r * 256 + c, s + g, m + g);                               \
            }                                                                                      \
        }                                                                                          \
        interleave_q(q, nb, name##_bits, to);                                                      \
        interleave_scales(s, m, GROUPS, nb * 32 / GROUP, name##_minima, to);                       \
    }

INLINE void interleave_q(const uint8_t *q, int nb, int bits, const panel *to) {
    for (int k = 0; k < nb * 8; k += 4) {
        wv w[4];
        wv_rows(q + k * 4, 256, w);
        for (int j = 0; j < 4; j++) {
            if (bits == 8) store_int8(to, k + j, w[j]);
            else store_q(to, k + j, w[j]);
        }
    }
}

// s, m: [QF][groups], of which `used` in each row
INLINE void interleave_scales(const float *s, const float *m, int groups, int used, bool minima,
                              const panel *to) {
    for (int g = 0; g < used; g += 4) {
        wv ws[4], wm[4];
        wv_rows((const uint8_t *)(s + g), groups * 4, ws);
        if (minima) wv_rows((const uint8_t *)(m + g), groups * 4, wm);
        for (int j = 0; j < 4 && g + j < used; j++) {
            if (minima) store_s_m(to, g + j, qf_of_bits(ws[j]), qf_of_bits(wm[j]));
            else store_s(to, g + j, qf_of_bits(ws[j]));
        }
    }
}

PACK_BY_LINES(iq1_s)
PACK_BY_LINES(iq1_m)
PACK_BY_LINES(iq2_xxs)
PACK_BY_LINES(iq2_xs)
PACK_BY_LINES(iq2_s)
PACK_BY_LINES(iq3_xxs)
PACK_BY_LINES(iq3_s)
PACK_BY_LINES(tq1_0)

// nb * 32 columns from column first_block32 * 32 on, of which n_rows (1..NR) rows exist. A chunk
// starts at a multiple of 256 columns. Rows that do not exist become blocks of zero bytes with s =
// 0.
#define X(NAME, name, id, ELEMENTS, BYTES, BITS, GROUP, OFF)                                       \
    INLINE void panel_pack_##name(const uint8_t *rows, int64_t row_bytes, int n_rows,              \
                                  int64_t first_block32, int nb, panel *p) {                       \
        const uint8_t *src = rows + first_block32 * 32 / ELEMENTS * BYTES;                         \
        for (int r = 0; r < NR; r += QF) {                                                         \
            const panel to = {p->q + 4 * r, p->s + r, p->m + r, NULL, NULL};                       \
            uint8_t copy[QF * (256 / ELEMENTS * BYTES)];                                           \
            const uint8_t *from = copy;                                                            \
            int64_t stride = nb * 32 / ELEMENTS * BYTES;                                           \
            const int missing = r + QF - n_rows;                                                   \
            if (missing > 0) {                                                                     \
                copy_rows(src + r * row_bytes, row_bytes, QF - missing, stride, copy);             \
            } else {                                                                               \
                from = src + r * row_bytes;                                                        \
                stride = row_bytes;                                                                \
            }                                                                                      \
            pack_##name(from, stride, nb, &to);                                                    \
            for (int lane = missing < QF ? QF - missing : 0; lane < QF; lane++) {                  \
                for (int g = 0; g < nb * 32 / GROUP; g++) {                                        \
                    to.s[g * NR + lane] = 0;                                                       \
                    if (name##_minima) to.m[g * NR + lane] = 0;                                    \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }

INLINE void copy_rows(const uint8_t *src, int64_t stride, int n, int64_t bytes, uint8_t *to) {
    memset(to, 0, (size_t)(QF * bytes));
    for (int r = 0; r < n; r++) memcpy(to + r * bytes, src + r * stride, (size_t)bytes);
}
QRT_QUANT_FORMATS(X)
#undef X
#endif

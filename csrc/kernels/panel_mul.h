// Products of a packed panel (kernels/panel.h) with quantised rows. For each row of the panel and
// each x row:
//     acc += (sum over the groups of a block of 32: s * ((q - off) . x)) * d_x - sum over the
//     groups: m * sum_x
// block after block in column order, so that a result never depends on how many x rows a call has.
// What is in brackets is a whole number: sums of q . x begin at minus off times the sum of x.
#ifndef QRT_PANEL_MUL_H
#define QRT_PANEL_MUL_H
#include "panel.h"

#define NV (NR / QF) // vectors of a panel row group

#if defined(QRT_LEVEL_AVX512) || defined(QRT_LEVEL_AVX512BF16)
#    define TILE 6
#    define AT_ONCE(group) ((group) == 16 ? 3 : 6)
typedef __m512i ilane;
INLINE qf ilane_float(ilane a) { return _mm512_cvtepi32_ps(a); }

// q: [GROUP / 4][NR][4], group g of the chunk; taken: something is taken off weights
INLINE void dot_group(const int bits, const int group, const bool taken, const int mr,
                      const uint8_t *q, const xrow *x, int64_t g, ilane out[][NV]) {
    const int64_t k = g * group;
    (void)bits;
#    pragma GCC unroll 8
    for (int t = 0; t < mr; t++)
#    pragma GCC unroll 2
        for (int v = 0; v < NV; v++) out[t][v] = _mm512_set1_epi32(taken ? x[t].starts[g] : 0);
#    pragma GCC unroll 8
    for (int j = 0; j < group / 4; j++) {
        __m512i w[NV];
#    pragma GCC unroll 2
        for (int v = 0; v < NV; v++) w[v] = _mm512_loadu_si512(q + (j * NV + v) * 64);
#    pragma GCC unroll 8
        for (int t = 0; t < mr; t++) {
            int32_t four;
            memcpy(&four, x[t].q + k + 4 * j, 4);
            __m512i b = _mm512_set1_epi32(four);
#    pragma GCC unroll 2
            for (int v = 0; v < NV; v++) {
                out[t][v] = _mm512_dpbusd_epi32(out[t][v], w[v], b);
                HOLD(out[t][v]);
            }
        }
    }
}
#elif defined(QRT_LEVEL_AVX2)
#    define TILE 4
typedef __m256i ilane;
INLINE qf ilane_float(ilane a) { return _mm256_cvtepi32_ps(a); }

// Four columns of a full tile: s[t][v] = or += products of w[v] and x[t], pairs of them added in
// int16 below 8 bits, fours in int32 for 8. In assembly, as the compiler spills at any other order:
// 8 sums, 2 vectors of weights, 2 products and ones are 13 of 16 registers. Two products, then
// their two sums: by turns, sums take more of the ports that products need.
#    define PAIR(OP, A0, A1, B0, B1, TO0, TO1)                                                     \
        OP " %[" A0 "], %[" B0 "], %[" TO0 "]\n\t" OP " %[" A1 "], %[" B1 "], %[" TO1 "]\n\t"
#    define FIRST(J, T) PAIR("vpmaddubsw", "b", "b", "w0", "w1", "s" #T "0", "s" #T "1")
#    define NEXT(J, T)                                                                             \
        PAIR("vpmaddubsw", "b", "b", "w0", "w1", "p", "b")                                         \
        PAIR("vpaddw", "p", "b", "s" #T "0", "s" #T "1", "s" #T "0", "s" #T "1")
// 8 bits: |w| * (x with the sign of w), |w| in w0 and w1; pairs stay below 2^15 as |x| <= 127.
#    define SIGNED(J)                                                                              \
        "vpsignb 128*" #J "+64(%[q]), %[b], %[p]\n\tvpsignb 128*" #J                               \
        "+96(%[q]), %[b], %[b]\n\t" PAIR("vpmaddubsw", "p", "b", "w0", "w1", "p", "b")
#    define FIRST_8(J, T)                                                                          \
        SIGNED(J) PAIR("vpmaddwd", "ones", "ones", "p", "b", "s" #T "0", "s" #T "1")
#    define NEXT_8(J, T)                                                                           \
        SIGNED(J)                                                                                  \
        PAIR("vpmaddwd", "ones", "ones", "p", "b", "p", "b")                                       \
        PAIR("vpaddd", "p", "b", "s" #T "0", "s" #T "1", "s" #T "0", "s" #T "1")
#    define ROW(J, T, ADD) "vpbroadcastd 4*" #J "(%[x" #T "]), %[b]\n\t" ADD(J, T)
#    define STEP(J, BYTES, ADD)                                                                    \
        "vmovdqa " #BYTES "*" #J "(%[q]), %[w0]\n\tvmovdqa " #BYTES "*" #J                         \
        "+32(%[q]), %[w1]\n\t" ROW(J, 0, ADD) ROW(J, 1, ADD) ROW(J, 2, ADD) ROW(J, 3, ADD)
#    define STEPS_2(BYTES, FIRST, NEXT) STEP(0, BYTES, FIRST) STEP(1, BYTES, NEXT)
#    define STEPS_4(BYTES, FIRST, NEXT)                                                            \
        STEPS_2(BYTES, FIRST, NEXT) STEP(2, BYTES, NEXT) STEP(3, BYTES, NEXT)
#    define STEPS_8(BYTES, FIRST, NEXT)                                                            \
        STEPS_4(BYTES, FIRST, NEXT)                                                                \
        STEP(4, BYTES, NEXT) STEP(5, BYTES, NEXT) STEP(6, BYTES, NEXT) STEP(7, BYTES, NEXT)
#    define RUN(STEPS, ...)                                                                        \
        __asm__(STEPS                                                                              \
                : [s00] "=&x"(s[0][0]), [s01] "=&x"(s[0][1]), [s10] "=&x"(s[1][0]),                \
                  [s11] "=&x"(s[1][1]), [s20] "=&x"(s[2][0]), [s21] "=&x"(s[2][1]),                \
                  [s30] "=&x"(s[3][0]), [s31] "=&x"(s[3][1]), [w0] "=&x"(w0), [w1] "=&x"(w1),      \
                  [b] "=&x"(b), [p] "=&x"(p)                                                       \
                : [q] "r"(q), [x0] "r"(x[0].q + k), [x1] "r"(x[1].q + k), [x2] "r"(x[2].q + k),    \
                  [x3] "r"(x[3].q + k),                                                            \
                  __VA_ARGS__ "m"(*(const uint8_t (*)[PARTS(8) * 8 * 4 * NR]) q), COLUMNS(0),      \
                  COLUMNS(1), COLUMNS(2), COLUMNS(3))
#    define ONES [ones] "x"(_mm256_set1_epi16(1)),
#    define COLUMNS(T) "m"(*(const int8_t (*)[8 * 4])(x[T].q + k))
INLINE void tile_sums(const int bits, const int steps, const uint8_t *q, const xrow *x, int k,
                      __m256i s[][NV]) {
    __m256i w0, w1, b, p;
    if (bits == 8 && steps == 8) RUN(STEPS_8(128, FIRST_8, NEXT_8), ONES);
    else if (bits == 8) RUN(STEPS_4(128, FIRST_8, NEXT_8), ONES);
    else if (steps == 8) RUN(STEPS_8(64, FIRST, NEXT));
    else if (steps == 4) RUN(STEPS_4(64, FIRST, NEXT));
    else RUN(STEPS_2(64, FIRST, NEXT));
}

// Sums of pairs stay in int16 for a few steps, which cannot overflow it: 2 * 127 * (2^bits - 1)
// each. 8 bits: sums of four in int32.
INLINE void dot_group(const int bits, const int group, const bool taken, const int mr,
                      const uint8_t *q, const xrow *x, int64_t g, ilane out[][NV]) {
    const int64_t k = g * group;
    const __m256i ones = _mm256_set1_epi16(1);
    const int most = bits <= 4 || bits == 8 ? 8 : bits == 5 ? 4 : 2;
    const int hold = most < group / 4 ? most : group / 4;
#    pragma GCC unroll 8
    for (int j0 = 0; j0 < group / 4; j0 += hold) {
        __m256i sum[TILE][NV];
        if (mr == TILE) {
            tile_sums(bits, hold, q + j0 * NV * 32 * PARTS(bits), x, k + 4 * j0, sum);
        } else {
#    pragma GCC unroll 8
            for (int j = j0; j < j0 + hold; j++) {
                const __m256i *at = (const __m256i *)q + j * NV * PARTS(bits);
                __m256i w[NV], sign[NV];
#    pragma GCC unroll 2
                for (int v = 0; v < NV; v++) {
                    w[v] = _mm256_loadu_si256(at + v);
                    if (bits == 8) sign[v] = _mm256_loadu_si256(at + NV + v);
                }
#    pragma GCC unroll 4
                for (int t = 0; t < mr; t++) {
                    int32_t four;
                    memcpy(&four, x[t].q + k + 4 * j, 4);
                    const __m256i b = _mm256_set1_epi32(four);
#    pragma GCC unroll 2
                    for (int v = 0; v < NV; v++) {
                        __m256i p;
                        if (bits == 8) {
                            p = _mm256_maddubs_epi16(w[v], _mm256_sign_epi8(b, sign[v]));
                            p = _mm256_madd_epi16(p, ones);
                            sum[t][v] = j == j0 ? p : _mm256_add_epi32(sum[t][v], p);
                        } else {
                            p = _mm256_maddubs_epi16(w[v], b);
                            sum[t][v] = j == j0 ? p : _mm256_add_epi16(sum[t][v], p);
                        }
                        HOLD(sum[t][v]);
                    }
                }
            }
        }
#    pragma GCC unroll 4
        for (int t = 0; t < mr; t++)
#    pragma GCC unroll 2
            for (int v = 0; v < NV; v++) {
                __m256i i = bits == 8 ? sum[t][v] : _mm256_madd_epi16(sum[t][v], ones);
                if (j0) i = _mm256_add_epi32(out[t][v], i);
                else if (taken) i = _mm256_add_epi32(_mm256_set1_epi32(x[t].starts[g]), i);
                if (taken) HOLD(i); // else all starts are loaded first, and sums spilled for them
                out[t][v] = i;
            }
    }
}
#elif defined(QRT_LEVEL_NEON)
#    define TILE 4
typedef int32x4_t ilane;
INLINE qf ilane_float(ilane a) { return vcvtq_f32_s32(a); }

INLINE void dot_group(const int bits, const int group, const bool taken, const int mr,
                      const uint8_t *q, const xrow *x, int64_t g, ilane out[][NV]) {
    const int64_t k = g * group;
    (void)bits; // all of them fit signed bytes
    for (int t = 0; t < mr; t++)
        for (int v = 0; v < NV; v++) out[t][v] = vdupq_n_s32(taken ? x[t].starts[g] : 0);
    for (int j = 0; j < group / 4; j++)
        for (int t = 0; t < mr; t++) {
            int32_t four;
            memcpy(&four, x[t].q + k + 4 * j, 4);
            int8x16_t b = vreinterpretq_s8_s32(vdupq_n_s32(four));
#    pragma GCC unroll 4
            for (int v = 0; v < NV; v++)
                out[t][v] =
                    vdotq_s32(out[t][v], vld1q_s8((const int8_t *)q + (j * NV + v) * 16), b);
        }
}
#else
#    define TILE 1
typedef int32_t ilane;
INLINE qf ilane_float(ilane a) { return (float)a; }

INLINE void dot_group(const int bits, const int group, const bool taken, const int mr,
                      const uint8_t *q, const xrow *x, int64_t g, ilane out[][NV]) {
    const int64_t k = g * group;
    for (int t = 0; t < mr; t++)
        for (int r = 0; r < NR; r++) {
            int32_t sum = taken ? x[t].starts[g] : 0;
            for (int j = 0; j < group / 4; j++)
                for (int i = 0; i < 4; i++) {
                    uint8_t w = q[(j * NR + r) * 4 + i];
                    sum += (bits == 8 ? (int8_t)w : w) * x[t].q[k + 4 * j + i];
                }
            out[t][r] = sum;
        }
}
#endif

// Of a tile, so many x rows meet a block together: as many as leave registers for their sums.
#ifndef AT_ONCE
#    define AT_ONCE(group) TILE
#endif

// A panel's rows are too many streams, each too short, for the processor to foresee. So while a
// panel is multiplied, the bytes of the next one (whose rows follow) are fetched in the order in
// which they lie, a few lines at a time: a burst would fill the queue of outstanding misses. They
// go to the second-level cache, as the first may be smaller than a panel's bytes.
INLINE const uint8_t *fetch_next(const uint8_t *ahead, const uint8_t *end, int lines) {
    for (; lines > 0 && ahead < end; lines--, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    return ahead;
}

// Block b, 32 columns of mr x rows: added to a.
INLINE void mul_block(const int bits, const int group, const int off, const int mr, const panel *p,
                      int b, const xrow *x, qf a[][NV]) {
    const int per = 32 / group;
    qf f[TILE][NV];
#pragma GCC unroll 2
    for (int g = 0; g < per; g++) {
        ilane i[TILE][NV];
        const int64_t at = b * per + g;
        dot_group(bits, group, TAKEN(bits, off) != 0, mr, p->q + at * group * NR * PARTS(bits), x,
                  at, i);
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            qf s = qf_load(p->s + at * NR + v * QF);
#pragma GCC unroll 8
            for (int t = 0; t < mr; t++) {
                qf y = ilane_float(i[t][v]);
                f[t][v] = g == 0 ? qf_mul(y, s) : qf_fma(y, s, f[t][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < mr; t++) {
        qf d = qf_set1(x[t].d[b]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) a[t][v] = qf_fma(f[t][v], d, a[t][v]);
    }
    if (HAS_MINIMA(bits, off)) {
#pragma GCC unroll 2
        for (int g = 0; g < per; g++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) {
                qf m = qf_load(p->m + (b * per + g) * NR + v * QF);
#pragma GCC unroll 8
                for (int t = 0; t < mr; t++)
                    a[t][v] = qf_fnma(m, qf_set1(x[t].s[b * per + g]), a[t][v]);
            }
    }
}

// acc: mr rows of NR floats, unset if these columns begin them; lines: as many are fetched for each
// 32 columns
INLINE void mul_tile(const int bits, const int group, const int off, const int mr, panel *p, int nb,
                     int lines, xrow *x, bool begin, float *acc) {
    qf a[TILE][NV];
#pragma GCC unroll 8
    for (int t = 0; t < mr; t++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) a[t][v] = begin ? qf_zero() : qf_load(acc + t * NR + v * QF);
    const uint8_t *ahead = p->ahead, *const end = p->ahead_end;
    for (int b = 0; b < nb; b++) {
        ahead = fetch_next(ahead, end, lines);
        // Addresses of x rows are read where they are used. They are too many for the registers,
        // and the compiler keeps some in vectors, where they wait behind the products.
        __asm__("" : "+m"(*(xrow(*)[TILE])x));
#pragma GCC unroll 2
        for (int t = 0; t < mr; t += AT_ONCE(group)) {
            const int rows = mr - t < AT_ONCE(group) ? mr - t : AT_ONCE(group);
            mul_block(bits, group, off, rows, p, b, x + t, a + t);
        }
    }
    p->ahead = ahead;
#pragma GCC unroll 8
    for (int t = 0; t < mr; t++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) qf_store(acc + t * NR + v * QF, a[t][v]);
}

// x rows i .. end of a call against one chunk of a panel; xs: rows of x; starts: [n][cols / group];
// acc: [n][NR], unset at the first chunk.
INLINE void mul_panel(const int bits, const int group, const int off, panel *p, int nb,
                      const qrt_quant *x, const int32_t *xs, const int32_t *starts, int64_t i,
                      int64_t end, int64_t first_block, float *acc) {
    const int64_t blocks = x->cols / 32, per = 32 / group, times = (end - i + TILE - 1) / TILE * nb;
    const int lines = (int)(((p->ahead_end - p->ahead) / 64 + times) / times);
    const float *sums = group == 32 ? x->s32 : x->s16;
    for (; i < end; i += TILE) {
        xrow r[TILE];
        const int m = (int)(end - i < TILE ? end - i : TILE);
        for (int t = 0; t < m; t++) {
            int64_t row = xs[i + t];
            __asm__("" : "+r"(row)); // in vectors these addresses would wait behind the products
            r[t] =
                (xrow){x->q + row * x->cols + first_block * 32, x->d + row * blocks + first_block,
                       sums + (row * blocks + first_block) * per,
                       starts + ((i + t) * blocks + first_block) * per};
        }
        float *to = acc + i * NR;
        const bool begin = first_block == 0;
        if (m == TILE) mul_tile(bits, group, off, TILE, p, nb, lines, r, begin, to);
#if TILE > 1
        else if (m == 1) mul_tile(bits, group, off, 1, p, nb, lines, r, begin, to);
        else if (m == 2) mul_tile(bits, group, off, 2, p, nb, lines, r, begin, to);
        else if (m == 3) mul_tile(bits, group, off, 3, p, nb, lines, r, begin, to);
#endif
#if TILE > 4
        else if (m == 4) mul_tile(bits, group, off, 4, p, nb, lines, r, begin, to);
        else mul_tile(bits, group, off, 5, p, nb, lines, r, begin, to);
#endif
    }
}
#endif

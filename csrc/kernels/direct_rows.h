// Products of a few x rows with eight weight rows, far from each other as in direct.h: 256 columns
// of the weight rows are split into bytes once, in the first-level cache, and all x rows meet them
// there. Also for one or two x rows of formats that direct.h has no kernel for. Float additions
// come in the order of panel_mul.h.
#ifndef QRT_DIRECT_ROWS_H
#define QRT_DIRECT_ROWS_H
#include "direct.h"
#include "panel.h" // scales

#define SPLIT_FORMATS(X)                                                                           \
    X(Q4_0, q4_0, 4, 32, 8)                                                                        \
    X(Q4_1, q4_1, 4, 32, 0)                                                                        \
    X(Q5_0, q5_0, 5, 32, 16)                                                                       \
    X(Q5_1, q5_1, 5, 32, 0)                                                                        \
    X(Q8_0, q8_0, 8, 32, 0)                                                                        \
    X(IQ4_NL, iq4_nl, 8, 32, 0)                                                                    \
    X(MXFP4, mxfp4, 8, 32, 0)                                                                      \
    X(Q2_K, q2_k, 4, 16, 0)                                                                        \
    X(Q3_K, q3_k, 4, 16, 4)                                                                        \
    X(Q4_K, q4_k, 4, 32, 0)                                                                        \
    X(Q5_K, q5_k, 5, 32, 0)                                                                        \
    X(Q6_K, q6_k, 6, 16, 32)                                                                       \
    X(IQ4_XS, iq4_xs, 8, 32, 0)                                                                    \
    X(TQ2_0, tq2_0, 4, 32, 1)

// split_<format>(src, stride, nb, q): nb x 32 columns as bytes, q[columns / 16][4]: 16 columns of
// row p in the lower half of [p], of row p + 4 in the upper one.
INLINE __m256i table_of(const int8_t *values) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)values));
}

// 16 bytes `at` bytes on: low nibbles are the columns at q, high ones those at `high`.
INLINE void split_nibbles_at(const places *r, int at, __m256i *q, __m256i *high) {
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++) {
        const __m256i w = row_pair(r, at, p);
        q[p] = low_four(w);
        high[p] = high_four(w);
    }
}
INLINE void look_up_at(const places *r, int at, __m256i table, __m256i *q) {
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++) {
        const __m256i w = row_pair(r, at, p);
        q[p] = _mm256_shuffle_epi8(table, low_four(w));
        q[4 + p] = _mm256_shuffle_epi8(table, high_four(w));
    }
}

// Blocks of `bytes` with 32 columns: scales before `at`, then nibbles.
INLINE void split_blocks(const uint8_t *src, int64_t stride, int nb, const int bytes, const int at,
                         __m256i *q) {
    places r = places_of(src, stride);
    for (int b = 0; b < nb; b++, r.a += bytes, r.b += bytes, q += 8)
        split_nibbles_at(&r, at, q, q + 4);
}
INLINE void look_up_blocks(const uint8_t *src, int64_t stride, int nb, const int bytes,
                           const int at, const int8_t *values, __m256i *q) {
    const __m256i table = table_of(values);
    places r = places_of(src, stride);
    for (int b = 0; b < nb; b++, r.a += bytes, r.b += bytes, q += 8) look_up_at(&r, at, table, q);
}
// A word at `bits` before the nibbles: bit i of it is bit 4 of column i.
INLINE void split_five_bits(const uint8_t *src, int64_t stride, int nb, const int bytes,
                            const int bits, __m256i *q) {
    const __m256i which = _mm256_set1_epi64x((int64_t)0x8040201008040201u),
                  sixteen = _mm256_set1_epi8(16);
    const __m256i low_bytes = _mm256_setr_epi64x(0, 0x0101010101010101, 0, 0x0101010101010101);
    const __m256i high_bytes = _mm256_add_epi8(low_bytes, _mm256_set1_epi8(2));
    places r = places_of(src, stride);
    for (int b = 0; b < nb; b++, r.a += bytes, r.b += bytes, q += 8) {
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++) {
            const __m256i w = row_pair(&r, bits + 4, p);
            const __m256i h =
                _mm256_inserti128_si256(_mm256_set1_epi32((int)qrt_u32(place(&r, p) + bits)),
                                        _mm_set1_epi32((int)qrt_u32(place(&r, p + 4) + bits)), 1);
            const __m256i l = _mm256_and_si256(_mm256_shuffle_epi8(h, low_bytes), which),
                          u = _mm256_and_si256(_mm256_shuffle_epi8(h, high_bytes), which);
            const __m256i lb = _mm256_and_si256(_mm256_cmpeq_epi8(l, which), sixteen),
                          ub = _mm256_and_si256(_mm256_cmpeq_epi8(u, which), sixteen);
            q[p] = _mm256_or_si256(low_four(w), lb);
            q[4 + p] = _mm256_or_si256(high_four(w), ub);
        }
    }
}

INLINE void split_q4_0(const uint8_t *src, int64_t stride, int nb, __m256i *q) {
    split_blocks(src, stride, nb, 18, 2, q);
}
INLINE void split_q4_1(const uint8_t *src, int64_t stride, int nb, __m256i *q) {
    split_blocks(src, stride, nb, 20, 4, q);
}
INLINE void split_q5_0(const uint8_t *src, int64_t stride, int nb, __m256i *q) {
    split_five_bits(src, stride, nb, 22, 2, q);
}
INLINE void split_q5_1(const uint8_t *src, int64_t stride, int nb, __m256i *q) {
    split_five_bits(src, stride, nb, 24, 4, q);
}
INLINE void split_iq4_nl(const uint8_t *src, int64_t stride, int nb, __m256i *q) {
    look_up_blocks(src, stride, nb, 18, 2, iq4_values, q);
}
INLINE void split_mxfp4(const uint8_t *src, int64_t stride, int nb, __m256i *q) {
    look_up_blocks(src, stride, nb, 17, 1, fp4_values, q);
}
INLINE void split_q8_0(const uint8_t *src, int64_t stride, int nb, __m256i *q) {
    places r = places_of(src, stride);
    for (int b = 0; b < nb; b++, r.a += 34, r.b += 34, q += 8)
#pragma GCC unroll 8
        for (int p = 0; p < 8; p++) q[p] = row_pair(&r, 2 + 16 * (p / 4), p % 4);
}
INLINE void split_q4_k(const uint8_t *src, int64_t stride, int nb, __m256i *q) {
    (void)nb;
    places r = places_of(src, stride);
    for (int i = 0; i < 4; i++, r.a += 32, r.b += 32, q += 16)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            split_nibbles_at(&r, 16 + 16 * half, q + 4 * half, q + 8 + 4 * half);
}
INLINE void split_iq4_xs(const uint8_t *src, int64_t stride, int nb, __m256i *q) {
    (void)nb;
    const __m256i table = table_of(iq4_values);
    places r = places_of(src, stride);
    for (int i = 0; i < 8; i++, r.a += 16, r.b += 16, q += 8) look_up_at(&r, 8, table, q);
}
INLINE void split_q5_k(const uint8_t *src, int64_t stride, int nb, __m256i *q) {
    (void)nb;
    const __m256i bit = _mm256_set1_epi8(16);
    places r = places_of(src, stride);
    for (int half = 0; half < 2; half++, r.a += 16, r.b += 16, q += 4)
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++) {
            const __m256i h = row_pair(&r, 16, p);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const __m256i w = row_pair(&r, 48 + 32 * i, p);
                const __m256i ha =
                    i < 2 ? _mm256_slli_epi16(h, 4 - 2 * i) : _mm256_srli_epi16(h, 2 * i - 4);
                const __m256i hb =
                    i < 2 ? _mm256_slli_epi16(h, 3 - 2 * i) : _mm256_srli_epi16(h, 2 * i - 3);
                q[16 * i + p] = _mm256_or_si256(low_four(w), _mm256_and_si256(ha, bit));
                q[16 * i + 8 + p] = _mm256_or_si256(high_four(w), _mm256_and_si256(hb, bit));
            }
        }
}
INLINE void split_q6_k(const uint8_t *src, int64_t stride, int nb, __m256i *q) {
    (void)nb;
    const __m256i upper = _mm256_set1_epi8(0x30);
    places r = places_of(src, stride);
    for (int i = 0; i < 4; i++) { // half a block, and 16 of its 32 bytes of qh
        const int ql = 64 * (i / 2) + 16 * (i % 2), qh = 128 + 32 * (i / 2) + 16 * (i % 2);
        __m256i *to = q + 32 * (i / 2) + 4 * (i % 2);
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++) {
            const __m256i h = row_pair(&r, qh, p), a = row_pair(&r, ql, p),
                          b = row_pair(&r, ql + 32, p);
            const __m256i h0 = _mm256_and_si256(_mm256_slli_epi16(h, 4), upper),
                          h1 = _mm256_and_si256(_mm256_slli_epi16(h, 2), upper),
                          h2 = _mm256_and_si256(h, upper),
                          h3 = _mm256_and_si256(_mm256_srli_epi16(h, 2), upper);
            to[p] = _mm256_or_si256(low_four(a), h0);
            to[8 + p] = _mm256_or_si256(low_four(b), h1);
            to[16 + p] = _mm256_or_si256(high_four(a), h2);
            to[24 + p] = _mm256_or_si256(high_four(b), h3);
        }
    }
}

// Four planes of two bits in each of 64 bytes at `qs`; third: 32 bytes at 0 hold bit 2 of eight
// planes.
INLINE void split_planes(const uint8_t *src, int64_t stride, const int qs, const bool third,
                         __m256i *q) {
    const __m256i three = _mm256_set1_epi8(3), four = _mm256_set1_epi8(4);
    places r = places_of(src, stride);
    for (int i = 0; i < 2; i++, r.a += 16, r.b += 16, q += 4) // 16 bytes at a time
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++) {
            const __m256i h = third ? row_pair(&r, 0, p) : three;
#pragma GCC unroll 2
            for (int n = 0; n < 2; n++) {
                const __m256i w = row_pair(&r, qs + 32 * n, p);
#pragma GCC unroll 4
                for (int plane = 0; plane < 4; plane++) {
                    __m256i v = _mm256_and_si256(_mm256_srli_epi16(w, 2 * plane), three);
                    if (third) {
                        const int bit = 4 * n + plane;
                        const __m256i t =
                            bit < 2 ? _mm256_slli_epi16(h, 2 - bit) : _mm256_srli_epi16(h, bit - 2);
                        v = _mm256_or_si256(v, _mm256_and_si256(t, four));
                    }
                    q[32 * n + 8 * plane + p] = v;
                }
            }
        }
}
INLINE void split_q2_k(const uint8_t *src, int64_t stride, int nb, __m256i *q) {
    (void)nb;
    split_planes(src, stride, 16, false, q);
}
INLINE void split_q3_k(const uint8_t *src, int64_t stride, int nb, __m256i *q) {
    (void)nb;
    split_planes(src, stride, 32, true, q);
}
INLINE void split_tq2_0(const uint8_t *src, int64_t stride, int nb, __m256i *q) {
    (void)nb;
    split_planes(src, stride, 0, false, q);
}

// v: sums of 16 or 32 columns as int16 (bits < 8) or int32
INLINE __m256i join(const int bits, const __m256i v[4]) {
    return bits == 4 ? whole(join_products(v)) : bits < 8 ? join_6_bits(v) : join_32(v);
}

// mr (1 or 2) x rows against nb x 32 columns of q; acc: [mr]
INLINE void dot_split(const int bits, const int group, const int off, const int mr,
                      const __m256i *q, int nb, const float *s, const float *m, const xrow *x,
                      qf *acc) {
    const int per = 32 / group;
    qf a[2];
#pragma GCC unroll 2
    for (int t = 0; t < mr; t++) a[t] = acc[t];
    for (int b = 0; b < nb; b++) {
        __m256i v[2][4], sums[2][2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const bool more = half && per == 1; // the same sums go on
            __m256i xs[2];
#pragma GCC unroll 2
            for (int t = 0; t < mr; t++) xs[t] = x_twice(x[t].q + 32 * b + 16 * half);
#pragma GCC unroll 4
            for (int p = 0; p < 4; p++) {
                const __m256i w = _mm256_load_si256(q + 8 * b + 4 * half + p);
                const __m256i size = bits == 8 ? _mm256_abs_epi8(w) : w;
#pragma GCC unroll 2
                for (int t = 0; t < mr; t++) {
                    __m256i y =
                        _mm256_maddubs_epi16(size, bits == 8 ? _mm256_sign_epi8(xs[t], w) : xs[t]);
                    if (bits == 8) y = pair_sums(y);
                    if (more)
                        y = bits == 8 ? _mm256_add_epi32(v[t][p], y) : _mm256_add_epi16(v[t][p], y);
                    v[t][p] = y;
                    HOLD(v[t][p]);
                }
            }
            if (per == 2 || half)
#pragma GCC unroll 2
                for (int t = 0; t < mr; t++) {
                    sums[t][half] = join(bits, v[t]);
                    if (off)
                        sums[t][half] =
                            from_start(sums[t][half], x[t].starts[b * per + half % per]);
                }
        }
#pragma GCC unroll 2
        for (int t = 0; t < mr; t++) {
            const float *sb = s + b * per * NR, *mb = m + b * per * NR;
            if (per == 1) {
                a[t] = add_block(a[t], sums[t][1], sb, x[t].d[b]);
            } else {
                const qf f = qf_fma(_mm256_cvtepi32_ps(sums[t][1]), qf_load(sb + NR),
                                    qf_mul(_mm256_cvtepi32_ps(sums[t][0]), qf_load(sb)));
                a[t] = qf_fma(f, qf_set1(x[t].d[b]), a[t]);
            }
            if (HAS_MINIMA(bits, off))
#pragma GCC unroll 2
                for (int g = 0; g < per; g++)
                    a[t] = take_minimum(a[t], qf_load(mb + g * NR), x[t].s[b * per + g]);
            HOLD(a[t]);
        }
    }
#pragma GCC unroll 2
    for (int t = 0; t < mr; t++) acc[t] = a[t];
}
// All n x rows of a call: rows xs of x from block `first` of 32 columns on.
INLINE void dot_all_x(const int bits, const int group, const int off, const __m256i *q, int nb,
                      const float *s, const float *m, const qrt_quant *x, const int32_t *xs,
                      const int32_t *starts, int n, int64_t first, qf *acc) {
    int i = 0;
    for (; i + 2 <= n; i += 2) {
        const xrow two[2] = {x_row(x, xs, starts, i, first, group),
                             x_row(x, xs, starts, i + 1, first, group)};
        dot_split(bits, group, off, 2, q, nb, s, m, two, acc + i);
    }
    if (i < n) {
        const xrow one = x_row(x, xs, starts, i, first, group);
        dot_split(bits, group, off, 1, q, nb, s, m, &one, acc + i);
    }
}

// acc with the products of nb x 32 columns from block b on added
typedef void (*columns_fn)(const product *, const uint8_t *src, int64_t stride, int nb, int64_t b,
                           const float *s, const float *m, qf *acc);
typedef void (*scales_fn)(const uint8_t *src, int64_t stride, int nb, const panel *to);

// bytes: of the format, for 256 columns
INLINE void meet_split(const product *p, const uint8_t *src, int64_t stride, scales_fn scales,
                       columns_fn columns, const int bytes, qf *acc) {
    const int64_t blocks = p->w->cols / 32;
    _Alignas(64) float s[16 * NR], m[16 * NR];
    const panel to = {NULL, s, m, NULL, NULL};
    for (int i = 0; i < p->n; i++) acc[i] = qf_zero();
    for (int64_t b = 0; b < blocks; b += 8, src += bytes) {
        const int nb = (int)(blocks - b < 8 ? blocks - b : 8);
        scales(src, stride, nb, &to);
        columns(p, src, stride, nb, b, s, m, acc);
    }
}

// One function for each kind of split weights: formats share them.
#define DOT(BITS, GROUP, OFF)                                                                      \
    static __attribute__((noinline)) void dot_##BITS##_##GROUP##_##OFF(                            \
        const __m256i *q, int nb, const float *s, const float *m, const qrt_quant *x,              \
        const int32_t *xs, const int32_t *starts, int n, int64_t first, qf *acc) {                 \
        dot_all_x(BITS, GROUP, OFF, q, nb, s, m, x, xs, starts, n, first, acc);                    \
    }
DOT(4, 32, 0)
DOT(4, 32, 1)
DOT(4, 32, 8)
DOT(4, 16, 0)
DOT(4, 16, 4)
DOT(5, 32, 0)
DOT(5, 32, 16)
DOT(6, 16, 32)
DOT(8, 32, 0)
#undef DOT
#define X(NAME, name, BITS, GROUP, OFF)                                                            \
    INLINE void split_columns_##name(const product *p, const uint8_t *src, int64_t stride, int nb, \
                                     int64_t b, const float *s, const float *m, qf *acc) {         \
        __m256i q[64];                                                                             \
        split_##name(src, stride, nb, q);                                                          \
        for (int i = 0; i < QF; i++)                                                               \
            fetch_lines(src + i * stride, 256 / name##_elements * name##_bytes);                   \
        dot_##BITS##_##GROUP##_##OFF(q, nb, s, m, p->x, p->x_rows, p->starts, (int)p->n, b, acc);  \
    }                                                                                              \
    INLINE void split_eight_##name(const product *p, const uint8_t *src, int64_t stride,           \
                                   qf *acc) {                                                      \
        meet_split(p, src, stride, scales_##name, split_columns_##name,                            \
                   256 / name##_elements * name##_bytes, acc);                                     \
    }
SPLIT_FORMATS(X)
#undef X
#endif

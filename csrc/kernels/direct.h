// Products of one or a few x rows with eight weight rows, straight from the blocks as they lie: no
// panel is written. The eight rows are `stride` bytes apart, far from each other: eight streams of
// memory that the processor fetches at the same time. Float additions come in the order of
// panel_mul.h, so that the results are the same bits. For the common formats, at AVX2; higher
// levels use these too, since memory is what such products wait for.
#ifndef QRT_DIRECT_H
#define QRT_DIRECT_H
#include "panel_mul.h"

#if defined(QRT_LEVEL_AVX2)
#    define DIRECT_FORMATS(X) X(Q4_0, q4_0) X(Q8_0, q8_0) X(Q4_K, q4_k) X(Q5_K, q5_k) X(Q6_K, q6_k)

// The same place in each of the eight rows: a, a + one, a + 2 one, a + three, and b.. for rows 4 to
// 7, which are addresses that loads can form themselves.
typedef struct {
    const uint8_t *a, *b;
    int64_t one, three; // 1 and 3 times the distance of two rows
} places;

INLINE places places_of(const uint8_t *src, int64_t stride) {
    places r = {src, src + 4 * stride, stride, 3 * stride};
    __asm__ volatile("" : "+r"(r.b), "+r"(r.three));
    return r;
}
// Left alone, the compiler keeps sums of these for all loads of a block, and runs out of registers.
INLINE void forget_sums(places *r) { __asm__ volatile("" : "+r"(r->a), "+r"(r->b)); }

INLINE const uint8_t *place(const places *r, int row) {
    const uint8_t *p = row < 4 ? r->a : r->b;
    return row % 4 == 0 ? p : p + (row % 4 == 3 ? r->three : row % 4 * r->one);
}

// A block may lie across cache lines, and a load of 16 bytes that misses both of them waits twice:
// so the lines of each row are fetched some time before. A kernel does this between other work, a
// row or two at a time; all at once they would fill the queue of outstanding misses.
INLINE void fetch_lines(const uint8_t *row, const int bytes) {
    enum { AHEAD = 384 };
#    pragma GCC unroll 8
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(row + AHEAD + at, 0, 3);
}
INLINE void fetch_two(const places *r, const int step, const int bytes) {
    fetch_lines(place(r, 2 * step), bytes);
    fetch_lines(place(r, 2 * step + 1), bytes);
}

// 16 bytes of row p and of row p + 4, `at` bytes on.
INLINE __m256i row_pair(const places *r, int at, int p) {
    const __m128i low = _mm_loadu_si128((const __m128i *)(place(r, p) + at));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low),
                                   _mm_loadu_si128((const __m128i *)(place(r, p + 4) + at)), 1);
}
INLINE __m256i x_twice(const int8_t *x) { // 16 columns in both halves
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)x));
}
INLINE __m256i low_four(__m256i a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
INLINE __m256i high_four(__m256i a) { return low_four(_mm256_srli_epi16(a, 4)); }
INLINE __m256i pair_sums(__m256i a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }

// v[p]: numbers of row p in the lower half, of row p + 4 in the upper one, as int16 or int32. The
// sums of the eight rows in their order, as int32. A name says how many bits weights may have:
// eight pairs of 4-bit products fit int16, four of 5-bit ones, two of 6-bit ones.
#    define JOIN(bits, v, i)                                                                       \
        _mm256_add_epi##bits(_mm256_unpacklo_epi32(v[i], v[i + 1]),                                \
                             _mm256_unpackhi_epi32(v[i], v[i + 1]))
#    define JOIN_QUARTERS(bits, a, b)                                                              \
        _mm256_add_epi##bits(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b))
INLINE __m256i join_4_bits(const __m256i v[4]) {
    const __m256i a = JOIN(16, v, 0), b = JOIN(16, v, 2);
    return pair_sums(JOIN_QUARTERS(16, a, b));
}
INLINE __m256i join_6_bits(const __m256i v[4]) {
    const __m256i a = pair_sums(JOIN(16, v, 0)), b = pair_sums(JOIN(16, v, 2));
    return JOIN_QUARTERS(32, a, b);
}
INLINE __m256i join_32(const __m256i v[4]) {
    const __m256i a = JOIN(32, v, 0), b = JOIN(32, v, 2);
    return JOIN_QUARTERS(32, a, b);
}

INLINE qf add_block(qf acc, __m256i sums, const float *s, float d) {
    return qf_fma(qf_mul(ilane_float(sums), qf_load(s)), qf_set1(d), acc);
}
INLINE qf take_minimum(qf acc, qf m, float sum) { return qf_fnma(m, qf_set1(sum), acc); }

// direct_<format>(src, stride, nb, s, m, x, acc): acc with the products of nb x 32 columns of the
// rows added; s, m: what scales_<format> gives for them, [groups][NR].
INLINE qf direct_q4_0(const uint8_t *src, int64_t stride, int nb, const float *s, const float *m,
                      const xrow *x, qf acc) {
    places r = places_of(src, stride);
    for (int b = 0; b < nb; b++, r.a += 18, r.b += 18) {
        fetch_lines(src + b * stride, 8 * 18);
        const __m256i xl = x_twice(x->q + 32 * b), xh = x_twice(x->q + 32 * b + 16);
        __m256i v[4];
#    pragma GCC unroll 4
        for (int p = 0; p < 4; p++) {
            const __m256i w = row_pair(&r, 2, p);
            v[p] = _mm256_add_epi16(_mm256_maddubs_epi16(low_four(w), xl),
                                    _mm256_maddubs_epi16(high_four(w), xh));
        }
        acc = add_block(acc, join_4_bits(v), s + b * NR, x->d[b]);
        acc = take_minimum(acc, qf_load(m + b * NR), x->s[b]);
    }
    return acc;
}

// over: 0, or what the panels of the level that asks add to each weight.
INLINE qf direct_int8(const uint8_t *src, int64_t stride, int nb, const float *s, const xrow *x,
                      const int over, qf acc) {
    places r = places_of(src, stride);
    for (int b = 0; b < nb; b++, r.a += 34, r.b += 34) {
        fetch_lines(src + b * stride, 8 * 34);
        const __m256i xs[2] = {x_twice(x->q + 32 * b), x_twice(x->q + 32 * b + 16)};
        __m256i v[4];
#    pragma GCC unroll 4
        for (int p = 0; p < 4; p++) {
#    pragma GCC unroll 2
            for (int half = 0; half < 2; half++) { // signs of the weights go to x
                const __m256i w = row_pair(&r, 2 + 16 * half, p);
                const __m256i sums = pair_sums(
                    _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(xs[half], w)));
                v[p] = half ? _mm256_add_epi32(v[p], sums) : sums;
            }
            HOLD(v[p]);
        }
        __m256i sums = join_32(v);
        if (over) {
            const __m256i all = _mm256_set1_epi8(1);
            __m256i of_x = pair_sums(_mm256_add_epi16(_mm256_maddubs_epi16(all, xs[0]),
                                                      _mm256_maddubs_epi16(all, xs[1])));
            of_x = _mm256_hadd_epi32(of_x, of_x);
            of_x = _mm256_hadd_epi32(of_x, of_x);
            sums = _mm256_add_epi32(sums, _mm256_mullo_epi32(of_x, _mm256_set1_epi32(over)));
        }
        acc = add_block(acc, sums, s + b * NR, x->d[b]);
        if (over)
            acc = take_minimum(acc, qf_mul(qf_set1((float)over), qf_load(s + b * NR)), x->s[b]);
    }
    return acc;
}
INLINE qf direct_q8_0(const uint8_t *src, int64_t stride, int nb, const float *s, const float *m,
                      const xrow *x, qf acc) {
    (void)m;
    return direct_int8(src, stride, nb, s, x, 0, acc);
}
INLINE qf direct_q8_0_unsigned(const uint8_t *src, int64_t stride, int nb, const float *s,
                               const float *m, const xrow *x, qf acc) {
    (void)m;
    return direct_int8(src, stride, nb, s, x, UNSIGNED_OFF, acc);
}

// Columns 64 i to 64 i + 63: 32 bytes of qs. fifth: Q5_K, bits 2 i and 2 i + 1 of qh belong to
// them.
INLINE qf direct_nibbles_k(places *r, const int i, const bool fifth, const float *s, const float *m,
                           const xrow *x, qf acc) {
    const int qs = (fifth ? 48 : 16) + 32 * i, b = 2 * i;
    __m256i low[4], high[4];
    fetch_two(r, i, fifth ? 176 : 144);
#    pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        forget_sums(r);
        const __m256i xl = x_twice(x->q + 64 * i + 16 * half),
                      xh = x_twice(x->q + 64 * i + 32 + 16 * half);
#    pragma GCC unroll 4
        for (int p = 0; p < 4; p++) {
            const __m256i w = row_pair(r, qs + 16 * half, p);
            __m256i a = low_four(w), b = high_four(w);
            if (fifth) {
                const __m256i bit = _mm256_set1_epi8(16), h = row_pair(r, 16 + 16 * half, p);
                const __m256i ha =
                    i < 2 ? _mm256_slli_epi16(h, 4 - 2 * i) : _mm256_srli_epi16(h, 2 * i - 4);
                const __m256i hb =
                    i < 2 ? _mm256_slli_epi16(h, 3 - 2 * i) : _mm256_srli_epi16(h, 2 * i - 3);
                a = _mm256_or_si256(a, _mm256_and_si256(ha, bit));
                b = _mm256_or_si256(b, _mm256_and_si256(hb, bit));
            }
            a = _mm256_maddubs_epi16(a, xl), b = _mm256_maddubs_epi16(b, xh);
            low[p] = half ? _mm256_add_epi16(low[p], a) : a;
            high[p] = half ? _mm256_add_epi16(high[p], b) : b;
            HOLD(low[p]);
            HOLD(high[p]);
        }
    }
    acc = add_block(acc, fifth ? join_6_bits(low) : join_4_bits(low), s + b * NR, x->d[b]);
    acc = take_minimum(acc, qf_load(m + b * NR), x->s[b]);
    acc = add_block(acc, fifth ? join_6_bits(high) : join_4_bits(high), s + (b + 1) * NR,
                    x->d[b + 1]);
    return take_minimum(acc, qf_load(m + (b + 1) * NR), x->s[b + 1]);
}

INLINE qf direct_q4_k(const uint8_t *src, int64_t stride, int nb, const float *s, const float *m,
                      const xrow *x, qf acc) {
    (void)nb;
    places r = places_of(src, stride);
#    pragma GCC unroll 4
    for (int i = 0; i < 4; i++) acc = direct_nibbles_k(&r, i, false, s, m, x, acc);
    return acc;
}

INLINE qf direct_q5_k(const uint8_t *src, int64_t stride, int nb, const float *s, const float *m,
                      const xrow *x, qf acc) {
    (void)nb;
    places r = places_of(src, stride);
#    pragma GCC unroll 4
    for (int i = 0; i < 4; i++) acc = direct_nibbles_k(&r, i, true, s, m, x, acc);
    return acc;
}

// 16 columns of two quarters of half a block, low and high nibbles from ql on. second: they are the
// second and the fourth.
INLINE void direct_quarters(places *r, int ql, int qh, const int second, const int8_t *q,
                            __m256i *low_sums, __m256i *high_sums) {
    const __m256i upper = _mm256_set1_epi8(0x30), xl = x_twice(q), xh = x_twice(q + 64);
    __m256i low[4], high[4];
    forget_sums(r);
#    pragma GCC unroll 4
    for (int p = 0; p < 4; p++) {
        const __m256i h = row_pair(r, qh, p), w = row_pair(r, ql, p);
        const __m256i ha = _mm256_slli_epi16(h, second ? 2 : 4);
        const __m256i hb = second ? _mm256_srli_epi16(h, 2) : h;
        low[p] =
            _mm256_maddubs_epi16(_mm256_or_si256(low_four(w), _mm256_and_si256(ha, upper)), xl);
        high[p] =
            _mm256_maddubs_epi16(_mm256_or_si256(high_four(w), _mm256_and_si256(hb, upper)), xh);
        HOLD(low[p]);
        HOLD(high[p]);
    }
    *low_sums = join_6_bits(low);
    *high_sums = join_6_bits(high);
    HOLD(*low_sums);
    HOLD(*high_sums);
}

INLINE qf direct_q6_k(const uint8_t *src, int64_t stride, int nb, const float *s, const float *m,
                      const xrow *x, qf acc) {
    (void)nb;
    places r = places_of(src, stride);
#    pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {
        __m256i sums[8]; // of 16 columns each
#    pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const int ql = 64 * n + 16 * half, qh = 128 + 32 * n + 16 * half;
            const int8_t *q = x->q + 128 * n + 16 * half;
            fetch_two(&r, 2 * n + half, 210);
            direct_quarters(&r, ql, qh, 0, q, sums + half, sums + 4 + half);
            direct_quarters(&r, ql + 32, qh, 1, q + 32, sums + 2 + half, sums + 6 + half);
        }
#    pragma GCC unroll 4
        for (int b = 0; b < 4; b++) {
            const int g = 8 * n + 2 * b;
            const qf f = qf_fma(ilane_float(sums[2 * b + 1]), qf_load(s + (g + 1) * NR),
                                qf_mul(ilane_float(sums[2 * b]), qf_load(s + g * NR)));
            acc = qf_fma(f, qf_set1(x->d[4 * n + b]), acc);
            acc = take_minimum(acc, qf_load(m + g * NR), x->s[g]);
            acc = take_minimum(acc, qf_load(m + (g + 1) * NR), x->s[g + 1]);
        }
    }
    return acc;
}
#endif
#endif

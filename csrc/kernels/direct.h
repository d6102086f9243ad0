// Products of one or a few x rows with eight weight rows, straight from the blocks as they lie: no
// panel is written. The eight rows are `stride` bytes apart, far from each other: eight streams of
// memory that the processor fetches at the same time. Float additions come in the order of
// panel_mul.h, so that the results are the same bits. For the common formats, in the instructions
// of AVX2 at higher levels too.
#ifndef QRT_DIRECT_H
#define QRT_DIRECT_H
#include "product.h"
#include "../simd/words.h"

#define DIRECT_FORMATS(X) X(Q4_0, q4_0) X(Q8_0, q8_0) X(Q4_K, q4_k) X(Q5_K, q5_k) X(Q6_K, q6_k)

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
// Left alone, the compiler keeps sums of these (and of one of them and a place in the block) for
// all loads of a block, and runs out of registers.
INLINE void forget_sums(places *r) {
    __asm__ volatile("" : "+r"(r->a), "+r"(r->b), "+r"(r->one), "+r"(r->three));
}

INLINE const uint8_t *place(const places *r, int row) {
    const uint8_t *p = row < 4 ? r->a : r->b;
    return row % 4 == 0 ? p : p + (row % 4 == 3 ? r->three : row % 4 * r->one);
}

// A block may lie across cache lines, and a load of 16 bytes that misses both of them waits twice:
// so the lines of each row are fetched some time before. A kernel does this between other work, a
// row or two at a time; all at once they would fill the queue of outstanding misses.
INLINE void fetch_lines(const uint8_t *row, const int bytes) {
#pragma GCC unroll 8
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(row + STREAM_AHEAD + at, 0, 3);
}
INLINE void fetch_two(places *r, const int step, const int bytes) {
    forget_sums(r);
    fetch_lines(place(r, 2 * step), bytes);
    fetch_lines(place(r, 2 * step + 1), bytes);
}

// 16 bytes of row p and of row p + 4, `at` bytes on. The latter come by a blend, whose load begins
// 16 bytes before (in the same row or another: four rows precede row p + 4): an insertion into the
// upper half takes a whole cycle of the shuffles.
INLINE __m256i row_pair(const places *r, int at, int p) {
    const __m128i low = _mm_loadu_si128((const __m128i *)(place(r, p) + at));
    const __m256i high = _mm256_loadu_si256((const __m256i *)(place(r, p + 4) + at - 16));
    return _mm256_blend_epi32(_mm256_castsi128_si256(low), high, 0xf0);
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
#define JOINED(bits, a, b)                                                                         \
    _mm256_add_epi##bits(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b))
#define JOIN(bits, v, i) JOINED(bits, v[i], v[i + 1])
#define JOIN_QUARTERS(bits, a, b)                                                                  \
    _mm256_add_epi##bits(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b))
INLINE __m256i join_6_bits(const __m256i v[4]) {
    const __m256i a = pair_sums(JOIN(16, v, 0)), b = pair_sums(JOIN(16, v, 2));
    return JOIN_QUARTERS(32, a, b);
}
INLINE __m256i join_32(const __m256i v[4]) {
    const __m256i a = JOIN(32, v, 0), b = JOIN(32, v, 2);
    return JOIN_QUARTERS(32, a, b);
}

INLINE qf add_block(qf acc, __m256i sums, const float *s, float d) {
    return qf_fma(qf_mul(_mm256_cvtepi32_ps(sums), qf_load(s)), qf_set1(d), acc);
}
INLINE __m256i from_start(__m256i sums, int32_t start) {
    return _mm256_add_epi32(sums, _mm256_set1_epi32(start));
}
INLINE qf take_minimum(qf acc, qf m, float sum) { return qf_fnma(m, qf_set1(sum), acc); }

// Nibbles are multiplied in int16, or in int32 where an instruction adds up four products: there
// the high ones need no shift, as 16 times their sums are whole numbers too.
#ifdef QRT_HALF_VECTORS
#    define HIGH_TIMES 16
INLINE __m256i high_times(__m256i a) { return _mm256_and_si256(a, _mm256_set1_epi8((char)0xf0)); }
INLINE __m256i add_products(const bool first, __m256i sums, __m256i w, __m256i x) {
    return _mm256_dpbusd_epi32(first ? _mm256_setzero_si256() : sums, w, x);
}
INLINE __m256i join_products(const __m256i v[4]) { return join_32(v); }
INLINE __m256i join_products_6(const __m256i v[4]) { return join_32(v); }
INLINE __m256i whole(__m256i sums) { return sums; }
INLINE __m256i with_upper(__m256i low, __m256i upper) { // (low & 15) | upper
    return _mm256_ternarylogic_epi32(low, _mm256_set1_epi8(15), upper, 0xea);
}
#else
#    define HIGH_TIMES 1
INLINE __m256i high_times(__m256i a) { return high_four(a); }
INLINE __m256i add_products(const bool first, __m256i sums, __m256i w, __m256i x) {
    const __m256i p = _mm256_maddubs_epi16(w, x);
    return first ? p : _mm256_add_epi16(sums, p);
}
INLINE __m256i join_products(const __m256i v[4]) { // pairs, to be added
    const __m256i a = JOIN(16, v, 0), b = JOIN(16, v, 2);
    return JOIN_QUARTERS(16, a, b);
}
INLINE __m256i join_products_6(const __m256i v[4]) { return join_6_bits(v); }
INLINE __m256i whole(__m256i sums) { return pair_sums(sums); }
INLINE __m256i with_upper(__m256i low, __m256i upper) {
    return _mm256_or_si256(low_four(low), upper);
}
#endif

// Scales of eight blocks of Q4_0 in each row: h[block][row].
INLINE void scales_of_18(const places *r, uint16_t h[8][QF]) {
    __m256i rows[8], p[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) { // 32 bytes hold two: even blocks below, odd ones above
#define BYTES(at) _mm256_loadu_si256((const __m256i *)(place(r, i) + at))
        const __m256i a = _mm256_blend_epi32(BYTES(0), BYTES(32), 0x22);
        rows[i] = _mm256_blend_epi32(_mm256_blend_epi32(a, BYTES(64), 0x44), BYTES(96), 0x88);
#undef BYTES
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        p[i] = _mm256_blend_epi16(_mm256_permute2x128_si256(rows[i], rows[i + 4], 0x20),
                                  _mm256_permute2x128_si256(rows[i], rows[i + 4], 0x31), 0xaa);
    const __m256i a = _mm256_unpacklo_epi16(p[0], p[1]), b = _mm256_unpacklo_epi16(p[2], p[3]),
                  c = _mm256_unpackhi_epi16(p[0], p[1]), d = _mm256_unpackhi_epi16(p[2], p[3]);
    const __m256i two[4] = {_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b),
                            _mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        _mm256_store_si256((__m256i *)h + i, _mm256_permute4x64_epi64(two[i], 0xd8));
}

// direct_<format>(src, stride, blocks, x): products of one x row with eight rows of blocks x 32
// columns.
INLINE qf direct_q4_0(const uint8_t *src, int64_t stride, int64_t blocks, xrow x) {
    qf acc = qf_zero();
    places r = places_of(src, stride);
    for (int64_t c = 0; c < blocks; c += 8) {
        const int nb = (int)(blocks - c < 8 ? blocks - c : 8);
        _Alignas(32) uint16_t h[8][QF];
        if (nb == 8) {
            scales_of_18(&r, h);
        } else {
            for (int b = 0; b < nb; b++)
                for (int i = 0; i < QF; i++) h[b][i] = qrt_u16(r.a + i * stride + 18 * b);
        }
        const uint8_t *ahead = r.a;
        for (int b = 0; b < nb; b++, ahead += stride) {
            fetch_lines(ahead, 8 * 18);
            const __m256i xl = x_twice(x.q + 32 * b), xh = x_twice(x.q + 32 * b + 16);
            __m256i v[4];
#pragma GCC unroll 4
            for (int p = 0; p < 4; p++) {
                const __m256i w = row_pair(&r, 2, p);
                v[p] = add_products(true, w, low_four(w), xl);
                v[p] = add_products(false, v[p], high_four(w), xh);
                HOLD(v[p]);
            }
            const __m256i sums = from_start(whole(join_products(v)), x.starts[b]);
            acc = qf_fma(qf_mul(_mm256_cvtepi32_ps(sums), qf_from_f16(h[b])), qf_set1(x.d[b]), acc);
            r.a += 18, r.b += 18;
        }
        x.q += 256, x.d += 8, x.starts += 8;
    }
    return acc;
}

INLINE qf direct_q8_0(const uint8_t *src, int64_t stride, int64_t blocks, xrow x) {
    qf acc = qf_zero();
    places r = places_of(src, stride);
    for (int64_t b = 0; b < blocks; b++, r.a += 34, r.b += 34) {
        fetch_lines(r.a + b % 8 * (stride - 34), 8 * 34); // of eight blocks, a row at each
        const __m256i xs[2] = {x_twice(x.q + 32 * b), x_twice(x.q + 32 * b + 16)};
        __m256i v[4];
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) { // signs of the weights go to x
                const __m256i w = row_pair(&r, 2 + 16 * half, p);
                const __m256i sums = pair_sums(
                    _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(xs[half], w)));
                v[p] = half ? _mm256_add_epi32(v[p], sums) : sums;
            }
            HOLD(v[p]);
        }
        const qf s = qf_halves(r.a, stride);
        acc = qf_fma(qf_mul(_mm256_cvtepi32_ps(join_32(v)), s), qf_set1(x.d[b]), acc);
    }
    return acc;
}

// Byte `at` of the words of eight rows: as int16 twice in each word, and as int32.
INLINE __m256i byte_twice(__m256i words, const int at) {
    const int n = -128;
#define QUAD(i) (char)(4 * i + at), n, (char)(4 * i + at), n
    return _mm256_shuffle_epi8(words, _mm256_setr_epi8(QUAD(0), QUAD(1), QUAD(2), QUAD(3), QUAD(0),
                                                       QUAD(1), QUAD(2), QUAD(3)));
#undef QUAD
}
INLINE __m256i byte_of(__m256i words, const int at) {
    return _mm256_and_si256(_mm256_srli_epi32(words, 8 * at), _mm256_set1_epi32(255));
}

// Of a block of Q4_K or Q5_K in each row: integer scales, four to a word; d, and d / HIGH_TIMES;
// minima.
typedef struct {
    __m256i scales[2];
    qf d, d_high, m[8];
} scales_k;
INLINE void scales_of_k(const uint8_t *src, int64_t stride, scales_k *to) {
    wv h[4];
    qf dmin;
    wv_rows(src, stride, h);
    qf_of_pairs(h[0], &to->d, &dmin);
    to->d_high = qf_mul(to->d, qf_set1(1.0f / HIGH_TIMES));
    to->scales[0] = (__m256i)(h[1] & 0x3f3f3f3fu);
    to->scales[1] = (__m256i)(low_nibbles(h[3]) | (h[1] >> 2 & 0x30303030u));
    const wv mn[2] = {h[2] & 0x3f3f3f3fu, high_nibbles(h[3]) | (h[2] >> 2 & 0x30303030u)};
#pragma GCC unroll 8
    for (int b = 0; b < 8; b++)
        to->m[b] = qf_mul(dmin, _mm256_cvtepi32_ps(byte_of((__m256i)mn[b / 4], b % 4)));
}

// What join_products gives times byte `at` of the words of eight rows.
INLINE __m256i times_byte(__m256i sums, __m256i words, const int at) {
#ifdef QRT_HALF_VECTORS
    return _mm256_mullo_epi32(sums, byte_of(words, at));
#else
    return _mm256_madd_epi16(sums, byte_twice(words, at));
#endif
}

// Columns 64 i to 64 i + 63 of Q4_K, 32 bytes of qs: sums of the low nibbles, and of the high ones
// HIGH_TIMES.
INLINE void direct_64_of_4(places *r, const int i, const int8_t *x, __m256i sums[2]) {
    __m256i low[4], high[4];
    fetch_two(r, i, 144);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        forget_sums(r);
        const __m256i xl = x_twice(x + 64 * i + 16 * half),
                      xh = x_twice(x + 64 * i + 32 + 16 * half);
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++) {
            const __m256i w = row_pair(r, 16 + 32 * i + 16 * half, p);
            low[p] = add_products(!half, low[p], low_four(w), xl);
            high[p] = add_products(!half, high[p], high_times(w), xh);
            HOLD(low[p]);
            HOLD(high[p]);
        }
    }
    sums[0] = join_products(low);
    sums[1] = join_products(high);
}
// d * scale * sum as (scale * sum) * d: scale * sum is an integer below 2^24, 16 times it has no
// more digits, so either way only the result is rounded.
INLINE qf add_4_bits(const __m256i sums, const scales_k *k, const int b, const float *d,
                     const float *s, qf acc) {
    const qf scaled = _mm256_cvtepi32_ps(times_byte(sums, k->scales[b / 4], b % 4));
    acc = qf_fma(qf_mul(scaled, b % 2 ? k->d_high : k->d), qf_set1(d[b]), acc);
    acc = take_minimum(acc, k->m[b], s[b]);
    HOLD(acc);
    return acc;
}

INLINE qf direct_q4_k(const uint8_t *src, int64_t stride, int64_t blocks, xrow x) {
    qf acc = qf_zero();
    places r = places_of(src, stride);
    for (int64_t c = 0; c < blocks / 8; c++) {
        scales_k k;
        scales_of_k(r.a, stride, &k);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m256i sums[2];
            direct_64_of_4(&r, i, x.q, sums);
            acc = add_4_bits(sums[0], &k, 2 * i, x.d, x.s, acc);
            acc = add_4_bits(sums[1], &k, 2 * i + 1, x.d, x.s, acc);
        }
        x.q += 256, x.d += 8, x.s += 8;
        r.a += 144, r.b += 144;
    }
    return acc;
}

// Columns 64 i to 64 i + 63 of Q5_K: 32 bytes of qs; bits 2 i and 2 i + 1 of qh belong to them.
INLINE void direct_64_of_5(places *r, const int i, const int8_t *x, __m256i sums[2]) {
    const int qs = 48 + 32 * i;
    const __m256i bit = _mm256_set1_epi8(16);
    __m256i low[4], high[4];
    fetch_two(r, i, 176);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        forget_sums(r);
        const __m256i xl = x_twice(x + 64 * i + 16 * half),
                      xh = x_twice(x + 64 * i + 32 + 16 * half);
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++) {
            const __m256i w = row_pair(r, qs + 16 * half, p), h = row_pair(r, 16 + 16 * half, p);
            const __m256i ha =
                i < 2 ? _mm256_slli_epi16(h, 4 - 2 * i) : _mm256_srli_epi16(h, 2 * i - 4);
            const __m256i hb =
                i < 2 ? _mm256_slli_epi16(h, 3 - 2 * i) : _mm256_srli_epi16(h, 2 * i - 3);
            const __m256i a = with_upper(w, _mm256_and_si256(ha, bit)),
                          b = with_upper(_mm256_srli_epi16(w, 4), _mm256_and_si256(hb, bit));
            low[p] = add_products(!half, low[p], a, xl);
            high[p] = add_products(!half, high[p], b, xh);
            HOLD(low[p]);
            HOLD(high[p]);
        }
    }
    sums[0] = join_products_6(low);
    sums[1] = join_products_6(high);
}

// Not one function with direct_q4_k, which is then some percent slower.
INLINE qf direct_q5_k(const uint8_t *src, int64_t stride, int64_t blocks, xrow x) {
    qf acc = qf_zero();
    places r = places_of(src, stride);
    for (int64_t c = 0; c < blocks / 8; c++) {
        scales_k k;
        scales_of_k(r.a, stride, &k);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m256i sums[2];
            direct_64_of_5(&r, i, x.q, sums);
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) {
                const int b = 2 * i + j;
                const qf s = qf_mul(k.d, _mm256_cvtepi32_ps(byte_of(k.scales[b / 4], b % 4)));
                acc = qf_fma(qf_mul(_mm256_cvtepi32_ps(sums[j]), s), qf_set1(x.d[b]), acc);
                acc = take_minimum(acc, k.m[b], x.s[b]);
                HOLD(acc);
            }
        }
        x.q += 256, x.d += 8, x.s += 8;
        r.a += 176, r.b += 176;
    }
    return acc;
}

// Half a block of Q6_K in four rows, from l (in ql) and h (in qh) on. o[k]: sums of quarter k as
// int32, of its first 16 columns below and of the others above, in the order of the rows.
#ifdef QRT_HALF_VECTORS
INLINE __m256i six_bits(__m256i low, __m256i upper) {
    return with_upper(low, _mm256_and_si256(upper, _mm256_set1_epi8(0x30)));
}
INLINE void four_rows_6_bits(const uint8_t *l, const uint8_t *h, int64_t one, int64_t three,
                             const int8_t *x, __m256i o[4]) {
    __m256i w[4];
#    pragma GCC unroll 4
    for (int row = 0; row < 4; row++) {
        const int64_t at = row == 3 ? three : row * one;
        const __m256i a = _mm256_loadu_si256((const __m256i *)(l + at)),
                      b = _mm256_loadu_si256((const __m256i *)(l + at + 32)),
                      c = _mm256_loadu_si256((const __m256i *)(h + at));
        const __m256i q[4] = {six_bits(a, _mm256_slli_epi16(c, 4)),
                              six_bits(b, _mm256_slli_epi16(c, 2)),
                              six_bits(_mm256_srli_epi16(a, 4), c),
                              six_bits(_mm256_srli_epi16(b, 4), _mm256_srli_epi16(c, 2))};
#    pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const __m256i xk = _mm256_loadu_si256((const __m256i *)(x + 32 * k));
            const __m256i y = _mm256_dpbusd_epi32(_mm256_setzero_si256(), q[k], xk);
            if (row == 0) o[k] = y;
            if (row == 1) o[k] = JOINED(32, o[k], y);
            if (row == 2) w[k] = y;
            if (row == 3) w[k] = JOINED(32, w[k], y), o[k] = JOIN_QUARTERS(32, o[k], w[k]);
            HOLD(o[k]);
        }
    }
}
#else
// In assembly, as at any other order the compiler spills: 15 of 16 registers. A row: a and b get 64
// bytes of ql, c 32 bytes of qh, u the weights of one quarter after another, which TIMES(k) takes.
#    define SIX_LOW(SHIFT, L, K, TIMES)                                                            \
        "vpsllw $" #SHIFT ", %[c], %[t]\n\t"                                                       \
        "vpand %[nibble], %[" #L "], %[u]\n\t"                                                     \
        "vpand %[upper], %[t], %[t]\n\t"                                                           \
        "vpor %[t], %[u], %[u]\n\t" TIMES(K)
#    define SIX_HIGH(L, K, TIMES)                                                                  \
        "vpsrlw $4, %[" #L "], %[" #L "]\n\t"                                                      \
        "vpand %[upper], %[c], %[u]\n\t"                                                           \
        "vpand %[nibble], %[" #L "], %[" #L "]\n\t"                                                \
        "vpor %[" #L "], %[u], %[u]\n\t" TIMES(K)
#    define SIX_ROW(AT, TIMES)                                                                     \
        "vmovdqu (%[l]" AT "), %[a]\n\t"                                                           \
        "vmovdqu 32(%[l]" AT "), %[b]\n\t"                                                         \
        "vmovdqu (%[h]" AT "), %[c]\n\t" SIX_LOW(4, a, 0, TIMES) SIX_LOW(2, b, 1, TIMES)           \
            SIX_HIGH(a, 2, TIMES) "vpsrlw $2, %[c], %[c]\n\t" SIX_HIGH(b, 3, TIMES)
#    define SIX_FIRST(K) "vpmaddubsw 32*" #K "(%[x]), %[u], %[o" #K "]\n\t"
#    define SIX_THIRD(K) "vpmaddubsw 32*" #K "(%[x]), %[u], %[w" #K "]\n\t"
// Joined with the row before.
#    define SIX_JOIN(V, K)                                                                         \
        "vpmaddubsw 32*" #K "(%[x]), %[u], %[u]\n\t"                                               \
        "vpunpckldq %[u], %[" #V #K "], %[t]\n\t"                                                  \
        "vpunpckhdq %[u], %[" #V #K "], %[u]\n\t"                                                  \
        "vpaddw %[t], %[u], %[u]\n\t"                                                              \
        "vpmaddwd %[ones], %[u], %[" #V #K "]\n\t"
#    define SIX_SECOND(K) SIX_JOIN(o, K)
#    define SIX_FOURTH(K)                                                                          \
        SIX_JOIN(w, K)                                                                             \
        "vpunpcklqdq %[w" #K "], %[o" #K "], %[t]\n\t"                                             \
        "vpunpckhqdq %[w" #K "], %[o" #K "], %[u]\n\t"                                             \
        "vpaddd %[t], %[u], %[o" #K "]\n\t"
INLINE void four_rows_6_bits(const uint8_t *l, const uint8_t *h, int64_t one, int64_t three,
                             const int8_t *x, __m256i o[4]) {
    const __m256i nibble = _mm256_set1_epi8(15), upper = _mm256_set1_epi8(0x30),
                  ones = _mm256_set1_epi16(1);
    __m256i w0, w1, w2, w3, a, b, c, t, u;
    __asm__(SIX_ROW("", SIX_FIRST) SIX_ROW(",%[one]", SIX_SECOND) SIX_ROW(",%[one],2", SIX_THIRD)
                SIX_ROW(",%[three]", SIX_FOURTH)
            : [o0] "=&x"(o[0]), [o1] "=&x"(o[1]), [o2] "=&x"(o[2]), [o3] "=&x"(o[3]),
              [w0] "=&x"(w0), [w1] "=&x"(w1), [w2] "=&x"(w2), [w3] "=&x"(w3), [a] "=&x"(a),
              [b] "=&x"(b), [c] "=&x"(c), [t] "=&x"(t), [u] "=&x"(u)
            : [l] "r"(l), [h] "r"(h), [one] "r"(one), [three] "r"(three), [x] "r"(x),
              [nibble] "x"(nibble), [upper] "x"(upper), [ones] "m"(ones),
              "m"(*(const int8_t (*)[128])x));
}
#endif

// Scales of a block of Q6_K: [group][row].
INLINE void scales_by_group(const places *r, int8_t to[16][QF]) {
    const __m256i p0 = row_pair(r, 192, 0), p1 = row_pair(r, 192, 1), p2 = row_pair(r, 192, 2),
                  p3 = row_pair(r, 192, 3);
    const __m256i lo01 = _mm256_unpacklo_epi8(p0, p1), lo23 = _mm256_unpacklo_epi8(p2, p3),
                  hi01 = _mm256_unpackhi_epi8(p0, p1), hi23 = _mm256_unpackhi_epi8(p2, p3);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i u[4] = {_mm256_unpacklo_epi16(lo01, lo23), _mm256_unpackhi_epi16(lo01, lo23),
                          _mm256_unpacklo_epi16(hi01, hi23), _mm256_unpackhi_epi16(hi01, hi23)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        _mm256_store_si256((__m256i *)to + i, _mm256_permutevar8x32_epi32(u[i], order));
}
INLINE qf times_scales(qf d, const int8_t scales[QF]) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)scales);
    return qf_mul(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
}

// Columns 32 b to 32 b + 31 of half a block, whose sums are four_rows_6_bits' of rows 0 to 3 and of
// rows 4 to 7; scales, dx, starts: the half's.
INLINE qf add_6_bits(const __m256i sums[2][4], const int b, const int8_t scales[8][QF], qf d,
                     const float *dx, const int32_t *starts, qf acc) {
    const __m256i low = _mm256_load_si256(&sums[0][b]), high = _mm256_load_si256(&sums[1][b]);
    const __m256i mid = _mm256_permute2x128_si256(low, high, 0x21);
    const __m256i i0 = _mm256_blend_epi32(low, mid, 0xf0), i1 = _mm256_blend_epi32(mid, high, 0xf0);
    const qf s0 = times_scales(d, scales[2 * b]), s1 = times_scales(d, scales[2 * b + 1]);
    const qf f0 = _mm256_cvtepi32_ps(from_start(i0, starts[2 * b])),
             f1 = _mm256_cvtepi32_ps(from_start(i1, starts[2 * b + 1]));
    acc = qf_fma(qf_fma(f1, s1, qf_mul(f0, s0)), qf_set1(dx[b]), acc);
    HOLD(acc);
    return acc;
}

// The float sums are a chain, each waits for the one before: so those of half a block come among
// the products of the next half.
INLINE qf direct_q6_k(const uint8_t *src, int64_t stride, int64_t blocks, xrow x) {
    qf acc = qf_zero(), d = qf_zero();
    places r = places_of(src, stride);
    _Alignas(32) int8_t scales[16][QF];
    __m256i sums[2][2][4];
    int64_t c = 0;
    do {
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) {
            if (n) {
                scales_by_group(&r, scales);
                d = qf_halves(r.a + 208, stride);
            }
#pragma GCC unroll 2
            for (int rows = 0; rows < 2; rows++) {
                const uint8_t *from = rows ? r.b : r.a;
                fetch_two(&r, 2 * n + rows, 210);
                four_rows_6_bits(from + 64 * n, from + 128 + 32 * n, r.one, r.three, x.q + 128 * n,
                                 sums[n][rows]);
#pragma GCC unroll 2
                for (int b = 2 * rows; b < 2 * rows + 2; b++) {
                    if (n) acc = add_6_bits(sums[0], b, scales, d, x.d, x.starts, acc);
                    else if (c)
                        acc = add_6_bits(sums[1], b, scales + 8, d, x.d - 4, x.starts - 8, acc);
                }
            }
        }
        x.q += 256, x.d += 8, x.starts += 16;
        r.a += 210, r.b += 210;
    } while (++c < blocks / 8);
    for (int b = 0; b < 4; b++)
        acc = add_6_bits(sums[1], b, scales + 8, d, x.d - 4, x.starts - 8, acc);
    return acc;
}
#endif

// 32-bit words of QF rows side by side: lane r belongs to row r. The compiler's vector operators (&
// | ^ << >>) work on them at every level; here is what those lack. Include after one of
// simd/<isa>.h.
//     wv_rows      16 bytes of each row, stride apart, as four words
//     wv_rows_32   32 bytes of each row, as eight words
//     wv_row_words 4 bytes of each row
//     low_nibbles, high_nibbles
//     wv_lookup    every byte (below 16) through a table of 16 bytes
//     qf_from_int  signed words to float
//     qf_of_bits   the same bits as floats
//     qf_halves    one float16 of each row, stride apart
//     qf_of_pairs  words that hold two float16 each: the lower ones, the upper ones
#ifndef QRT_WORDS_H
#define QRT_WORDS_H

#if QF == 1
typedef uint32_t wv;
INLINE qf qf_from_int(wv a) { return (float)(int32_t)a; }
#else
typedef uint32_t wv __attribute__((vector_size(4 * QF)));
INLINE qf qf_from_int(wv a) {
    typedef int32_t ints __attribute__((vector_size(4 * QF)));
    typedef float floats __attribute__((vector_size(4 * QF)));
    return (qf) __builtin_convertvector((ints)a, floats);
}
#endif
INLINE wv low_nibbles(wv a) { return a & 0x0f0f0f0fu; }
INLINE wv high_nibbles(wv a) { return a >> 4 & 0x0f0f0f0fu; }
INLINE void wv_store(uint8_t *p, wv a) { memcpy(p, &a, sizeof a); }
INLINE wv wv_row_words(const uint8_t *p, int64_t stride) {
#if QF == 1
    (void)stride;
    return qrt_u32(p);
#else
    wv a;
    for (int r = 0; r < QF; r++) a[r] = qrt_u32(p + r * stride);
    return a;
#endif
}
INLINE qf qf_of_bits(wv a) {
    qf f;
    memcpy(&f, &a, sizeof f);
    return f;
}

#if QF >= 8
INLINE __m128i wv_eight_halves(const uint8_t *p, int64_t stride) {
    __m128i h = _mm_cvtsi32_si128(qrt_u16(p));
    h = _mm_insert_epi16(h, qrt_u16(p + stride), 1);
    h = _mm_insert_epi16(h, qrt_u16(p + 2 * stride), 2);
    h = _mm_insert_epi16(h, qrt_u16(p + 3 * stride), 3);
    h = _mm_insert_epi16(h, qrt_u16(p + 4 * stride), 4);
    h = _mm_insert_epi16(h, qrt_u16(p + 5 * stride), 5);
    h = _mm_insert_epi16(h, qrt_u16(p + 6 * stride), 6);
    return _mm_insert_epi16(h, qrt_u16(p + 7 * stride), 7);
}
#endif

#if QF == 16
// Addresses of 16 rows by way of six registers, hidden from the compiler, which would make all of
// them and keep some in vectors.
typedef struct {
    const uint8_t *fourth[4]; // row 0, 4, 8, 12
    int64_t one, three;       // 1 and 3 times the distance of two rows
} wv_places;
INLINE wv_places wv_places_of(const uint8_t *p, int64_t stride) {
    wv_places a = {{p, p + 4 * stride, p + 8 * stride, p + 12 * stride}, stride, 3 * stride};
    __asm__("" : "+r"(a.fourth[1]), "+r"(a.fourth[2]), "+r"(a.fourth[3]), "+r"(a.three));
    return a;
}
INLINE const uint8_t *wv_place(const wv_places *a, int row) {
    const uint8_t *p = a->fourth[row / 4];
    return row % 4 == 0 ? p : p + (row % 4 == 3 ? a->three : row % 4 * a->one);
}
INLINE __m512i wv_quarters(const wv_places *p, int i) { // rows i, i + 4, i + 8, i + 12
#    define ROW(r) _mm_loadu_si128((const __m128i *)wv_place(p, r))
    __m512i a = _mm512_castsi128_si512(ROW(i));
    a = _mm512_inserti32x4(a, ROW(i + 4), 1);
    a = _mm512_inserti32x4(a, ROW(i + 8), 2);
    return _mm512_inserti32x4(a, ROW(i + 12), 3);
#    undef ROW
}
INLINE void wv_rows(const uint8_t *p, int64_t stride, wv w[4]) {
    const wv_places at = wv_places_of(p, stride);
    __m512i a = wv_quarters(&at, 0), b = wv_quarters(&at, 1);
    __m512i c = wv_quarters(&at, 2), d = wv_quarters(&at, 3);
    __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
    w[0] = (wv)_mm512_unpacklo_epi64(ab, cd);
    w[1] = (wv)_mm512_unpackhi_epi64(ab, cd);
    ab = _mm512_unpackhi_epi32(a, b), cd = _mm512_unpackhi_epi32(c, d);
    w[2] = (wv)_mm512_unpacklo_epi64(ab, cd);
    w[3] = (wv)_mm512_unpackhi_epi64(ab, cd);
}
// Fewer insertions for the same bytes: each takes the time of one and a half other shuffles.
#    define WV_ROWS_32
INLINE void wv_eight_rows(const wv_places *p, int first, __m512i w[4]) {
#    define ROW(r) _mm256_loadu_si256((const __m256i *)wv_place(p, first + (r)))
    __m512i r[4]; // rows i and i + 4
    for (int i = 0; i < 4; i++)
        r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(ROW(i)), ROW(i + 4), 1);
#    undef ROW
    __m512i ab = _mm512_unpacklo_epi32(r[0], r[1]), cd = _mm512_unpacklo_epi32(r[2], r[3]);
    w[0] = _mm512_unpacklo_epi64(ab, cd), w[1] = _mm512_unpackhi_epi64(ab, cd);
    ab = _mm512_unpackhi_epi32(r[0], r[1]), cd = _mm512_unpackhi_epi32(r[2], r[3]);
    w[2] = _mm512_unpacklo_epi64(ab, cd), w[3] = _mm512_unpackhi_epi64(ab, cd);
}
INLINE void wv_rows_32(const uint8_t *p, int64_t stride, wv w[8]) {
    __m512i a[4], b[4]; // words i and i + 4 by turns, of four rows each
    const wv_places at = wv_places_of(p, stride);
    wv_eight_rows(&at, 0, a);
    wv_eight_rows(&at, 8, b);
    for (int i = 0; i < 4; i++) {
        w[i] = (wv)_mm512_shuffle_i32x4(a[i], b[i], 0x88);
        w[4 + i] = (wv)_mm512_shuffle_i32x4(a[i], b[i], 0xdd);
    }
}
INLINE wv wv_lookup(const uint8_t table[16], wv a) {
    __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
    return (wv)_mm512_shuffle_epi8(t, (__m512i)a);
}
INLINE qf qf_halves(const uint8_t *p, int64_t stride) {
    const __m128i low = wv_eight_halves(p, stride), high = wv_eight_halves(p + 8 * stride, stride);
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}
INLINE void qf_of_pairs(wv a, qf *low, qf *high) {
    typedef uint16_t halves __attribute__((vector_size(32)));
    halves h[2] = {__builtin_convertvector(a, halves), __builtin_convertvector(a >> 16, halves)};
    *low = qf_from_f16((const uint16_t *)h);
    *high = qf_from_f16((const uint16_t *)(h + 1));
}

#elif QF == 8
INLINE __m256i wv_halves(const uint8_t *p, int64_t stride) { // rows 0, 4
    __m256i a = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return _mm256_inserti128_si256(a, _mm_loadu_si128((const __m128i *)(p + 4 * stride)), 1);
}
INLINE void wv_rows(const uint8_t *p, int64_t stride, wv w[4]) {
    __m256i a = wv_halves(p, stride), b = wv_halves(p + stride, stride);
    __m256i c = wv_halves(p + 2 * stride, stride), d = wv_halves(p + 3 * stride, stride);
    __m256i ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
    w[0] = (wv)_mm256_unpacklo_epi64(ab, cd);
    w[1] = (wv)_mm256_unpackhi_epi64(ab, cd);
    ab = _mm256_unpackhi_epi32(a, b), cd = _mm256_unpackhi_epi32(c, d);
    w[2] = (wv)_mm256_unpacklo_epi64(ab, cd);
    w[3] = (wv)_mm256_unpackhi_epi64(ab, cd);
}
INLINE wv wv_lookup(const uint8_t table[16], wv a) {
    __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (wv)_mm256_shuffle_epi8(t, (__m256i)a);
}
INLINE qf qf_halves(const uint8_t *p, int64_t stride) {
    return _mm256_cvtph_ps(wv_eight_halves(p, stride));
}
INLINE void qf_of_pairs(wv a, qf *low, qf *high) {
    __m256i h = _mm256_packus_epi32((__m256i)(a & 0xffff), (__m256i)(a >> 16));
    h = _mm256_permute4x64_epi64(h, 0xd8);
    *low = _mm256_cvtph_ps(_mm256_castsi256_si128(h));
    *high = _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1));
}

#elif defined(QRT_LEVEL_NEON)
INLINE void wv_rows(const uint8_t *p, int64_t stride, wv w[4]) {
    uint32x4_t a = vreinterpretq_u32_u8(vld1q_u8(p));
    uint32x4_t b = vreinterpretq_u32_u8(vld1q_u8(p + stride));
    uint32x4_t c = vreinterpretq_u32_u8(vld1q_u8(p + 2 * stride));
    uint32x4_t d = vreinterpretq_u32_u8(vld1q_u8(p + 3 * stride));
    uint64x2_t ab = vreinterpretq_u64_u32(vtrn1q_u32(a, b));
    uint64x2_t cd = vreinterpretq_u64_u32(vtrn1q_u32(c, d));
    w[0] = (wv)vtrn1q_u64(ab, cd);
    w[2] = (wv)vtrn2q_u64(ab, cd);
    ab = vreinterpretq_u64_u32(vtrn2q_u32(a, b)), cd = vreinterpretq_u64_u32(vtrn2q_u32(c, d));
    w[1] = (wv)vtrn1q_u64(ab, cd);
    w[3] = (wv)vtrn2q_u64(ab, cd);
}
INLINE wv wv_lookup(const uint8_t table[16], wv a) {
    return (wv)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)a);
}
INLINE qf qf_halves(const uint8_t *p, int64_t stride) {
    uint16x4_t h = vdup_n_u16(qrt_u16(p));
    h = vset_lane_u16(qrt_u16(p + stride), h, 1);
    h = vset_lane_u16(qrt_u16(p + 2 * stride), h, 2);
    h = vset_lane_u16(qrt_u16(p + 3 * stride), h, 3);
    return vcvt_f32_f16(vreinterpret_f16_u16(h));
}
INLINE void qf_of_pairs(wv a, qf *low, qf *high) {
    *low = vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)a)));
    *high = vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32((uint32x4_t)a, 16)));
}

#else
INLINE void wv_rows(const uint8_t *p, int64_t stride, wv w[4]) {
    (void)stride;
    memcpy(w, p, 16);
}
INLINE wv wv_lookup(const uint8_t table[16], wv a) {
    return table[a & 15] | (wv)table[a >> 8 & 15] << 8 | (wv)table[a >> 16 & 15] << 16 |
           (wv)table[a >> 24] << 24;
}
INLINE qf qf_halves(const uint8_t *p, int64_t stride) {
    (void)stride;
    return qrt_half(p);
}
INLINE void qf_of_pairs(wv a, qf *low, qf *high) {
    uint16_t h[2] = {(uint16_t)a, (uint16_t)(a >> 16)};
    *low = qrt_half((const uint8_t *)h);
    *high = qrt_half((const uint8_t *)(h + 1));
}
#endif
#ifndef WV_ROWS_32
INLINE void wv_rows_32(const uint8_t *p, int64_t stride, wv w[8]) {
    wv_rows(p, stride, w);
    wv_rows(p + 16, stride, w + 4);
}
#endif
#endif

// pack_<format> for the common formats, without a line for each row: packed bytes are brought into
// lanes first (there are fewer of them), then split. Scales of QF rows are computed side by side,
// by scales_<format>(src, stride, nb, to), which has a use without the rest. Part of panel.h.
#ifndef QRT_PACK_H
#define QRT_PACK_H

INLINE qf scaled(qf d, wv a) { return qf_mul(d, qf_from_int(a)); }

// 16 bytes of each row: low nibbles from word k on, high nibbles from word high on.
INLINE void pack_nibbles(const uint8_t *src, int64_t stride, int k, int high, const panel *to) {
    wv w[4];
    wv_rows(src, stride, w);
    for (int j = 0; j < 4; j++) {
        store_q(to, k + j, low_nibbles(w[j]));
        store_q(to, high + j, high_nibbles(w[j]));
    }
}

INLINE void pack_lookup(const int8_t *values, const uint8_t *src, int64_t stride, int k,
                        const panel *to) {
    wv w[4];
    wv_rows(src, stride, w);
    for (int j = 0; j < 4; j++) {
        store_int8(to, k + j, wv_lookup((const uint8_t *)values, low_nibbles(w[j])));
        store_int8(to, k + 4 + j, wv_lookup((const uint8_t *)values, high_nibbles(w[j])));
    }
}

INLINE void scales_q4_0(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    for (int b = 0; b < nb; b++) store_s(to, b, qf_halves(src + 18 * b, stride));
}
INLINE void pack_q4_0(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    scales_q4_0(src, stride, nb, to);
    for (int b = 0; b < nb; b++, src += 18) {
        pack_nibbles(src + 2, stride, 8 * b, 8 * b + 4, to);
    }
}

// Blocks that begin with a scale and the smallest value, each float16.
INLINE void scales_with_least(const uint8_t *src, int64_t stride, int nb, int bytes,
                              const panel *to) {
    for (int b = 0; b < nb; b++, src += bytes) {
        qf d, m;
        qf_of_pairs(wv_row_words(src, stride), &d, &m);
        store_s_m(to, b, d, qf_mul(qf_set1(-1.0f), m));
    }
}
INLINE void scales_q4_1(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    scales_with_least(src, stride, nb, 20, to);
}
INLINE void pack_q4_1(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    scales_q4_1(src, stride, nb, to);
    for (int b = 0; b < nb; b++, src += 20) pack_nibbles(src + 4, stride, 8 * b, 8 * b + 4, to);
}

// 16 bytes of nibbles and a word at bits: bit i of it is bit 4 of column i.
INLINE void pack_five_bits(const uint8_t *src, const uint8_t *bits, int64_t stride, int k,
                           const panel *to) {
    wv w[4], h = wv_row_words(bits, stride);
    wv_rows(src, stride, w);
    for (int j = 0; j < 4; j++) { // four bits times 0x00204081: one in the lowest bit of each byte
        wv low = (h >> 4 * j & 15) * 0x00204081u & 0x01010101u;
        wv high = (h >> (16 + 4 * j) & 15) * 0x00204081u & 0x01010101u;
        store_q(to, k + j, low_nibbles(w[j]) | low << 4);
        store_q(to, k + 4 + j, high_nibbles(w[j]) | high << 4);
    }
}

INLINE void scales_q5_0(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    for (int b = 0; b < nb; b++) store_s(to, b, qf_halves(src + 22 * b, stride));
}
INLINE void pack_q5_0(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    scales_q5_0(src, stride, nb, to);
    for (int b = 0; b < nb; b++, src += 22) pack_five_bits(src + 6, src + 2, stride, 8 * b, to);
}

INLINE void scales_q5_1(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    scales_with_least(src, stride, nb, 24, to);
}
INLINE void pack_q5_1(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    scales_q5_1(src, stride, nb, to);
    for (int b = 0; b < nb; b++, src += 24) pack_five_bits(src + 8, src + 4, stride, 8 * b, to);
}

INLINE void scales_q8_0(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    for (int b = 0; b < nb; b++) store_s(to, b, qf_halves(src + 34 * b, stride));
}
INLINE void pack_q8_0(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    scales_q8_0(src, stride, nb, to);
    for (int b = 0; b < nb; b++, src += 34) {
        wv w[8];
        wv_rows_32(src + 2, stride, w);
        for (int j = 0; j < 8; j++) store_int8(to, 8 * b + j, w[j]);
    }
}

INLINE void scales_iq4_nl(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    for (int b = 0; b < nb; b++) store_s(to, b, qf_halves(src + 18 * b, stride));
}
INLINE void pack_iq4_nl(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    scales_iq4_nl(src, stride, nb, to);
    for (int b = 0; b < nb; b++, src += 18) pack_lookup(iq4_values, src + 2, stride, 8 * b, to);
}

INLINE void scales_iq4_xs(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    (void)nb;
    wv h[4]; // d and scales_h, scales_l
    wv_rows(src, stride, h);
    qf d = qf_halves(src, stride);
    for (int i = 0; i < 8; i++) {
        wv scale = (h[1] >> 4 * i & 15) | (h[0] >> (16 + 2 * i) & 3) << 4;
        store_s(to, i, scaled(d, scale - 32));
    }
}
INLINE void pack_iq4_xs(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    scales_iq4_xs(src, stride, nb, to);
    for (int i = 0; i < 8; i++) pack_lookup(iq4_values, src + 8 + 16 * i, stride, 8 * i, to);
}

INLINE void scales_mxfp4(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    for (int b = 0; b < nb; b++, src += 17) {
        float s[QF];
        for (int r = 0; r < QF; r++) s[r] = half_e8m0(src[r * stride]);
        store_s(to, b, qf_load(s));
    }
}
INLINE void pack_mxfp4(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    scales_mxfp4(src, stride, nb, to);
    for (int b = 0; b < nb; b++, src += 17) pack_lookup(fp4_values, src + 1, stride, 8 * b, to);
}

INLINE void pack_nvfp4(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    for (int b = 0; b < nb; b += 2, src += 36) {
        for (int g = 0; g < 4; g++) {
            float s[QF];
            for (int r = 0; r < QF; r++) s[r] = half_ue4m3(src[r * stride + g]);
            store_s(to, 2 * b + g, qf_load(s));
        }
        for (int half = 0; half < 2; half++) { // 8 bytes are 16 columns
            wv w[4];
            wv_rows(src + 4 + 16 * half, stride, w);
            for (int j = 0; j < 4; j++) {
                const int k = 8 * b + 8 * half + j / 2 * 4 + j % 2;
                store_int8(to, k, wv_lookup((const uint8_t *)fp4_values, low_nibbles(w[j])));
                store_int8(to, k + 2, wv_lookup((const uint8_t *)fp4_values, high_nibbles(w[j])));
            }
        }
    }
}

// Two planes of 16 columns for each pair of bits: qs[64] from src on. hmask NULL or the bytes with
// bit 2 of each plane.
INLINE void pack_planes(const uint8_t *src, const uint8_t *hmask, int64_t stride, const panel *to) {
    for (int i = 0; i < 2; i++) { // 16 bytes at a time
        wv h[4];
        if (hmask) wv_rows(hmask + 16 * i, stride, h);
        for (int n = 0; n < 2; n++) {
            wv w[4];
            wv_rows(src + 32 * n + 16 * i, stride, w);
            for (int plane = 0; plane < 4; plane++) {
                for (int j = 0; j < 4; j++) {
                    wv q = w[j] >> 2 * plane & 0x03030303u;
                    if (hmask) q |= (h[j] >> (4 * n + plane) & 0x01010101u) << 2;
                    store_q(to, 32 * n + 8 * plane + 4 * i + j, q);
                }
            }
        }
    }
}

INLINE void scales_q2_k(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    (void)nb;
    qf d, dmin;
    qf_of_pairs(wv_row_words(src + 80, stride), &d, &dmin);
    wv scales[4];
    wv_rows(src, stride, scales);
    for (int g = 0; g < 16; g++) {
        wv both = scales[g / 4] >> 8 * (g % 4);
        store_s_m(to, g, scaled(d, both & 15), scaled(dmin, both >> 4 & 15));
    }
}
INLINE void pack_q2_k(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    scales_q2_k(src, stride, nb, to);
    pack_planes(src + 16, NULL, stride, to);
}

INLINE void scales_q3_k(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    (void)nb;
    qf d = qf_halves(src + 108, stride);
    wv w[4]; // the last 16 bytes of a block: qs[62..63], scales[12], d
    wv_rows(src + 94, stride, w);
    const wv s[3] = {w[0] >> 16 | w[1] << 16, w[1] >> 16 | w[2] << 16, w[2] >> 16 | w[3] << 16};
    for (int g = 0; g < 16; g++) {
        wv low = s[g / 4 % 2] >> (8 * (g % 4) + 4 * (g / 8)) & 15;
        wv high = s[2] >> (8 * (g % 4) + 2 * (g / 4)) & 3;
        store_s(to, g, scaled(d, (low | high << 4) - 32));
    }
}
INLINE void pack_q3_k(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    scales_q3_k(src, stride, nb, to);
    pack_planes(src + 32, src, stride, to);
}

INLINE void scales_tq2_0(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    (void)nb;
    qf d = qf_halves(src + 64, stride);
    for (int g = 0; g < 8; g++) store_s(to, g, d);
}
INLINE void pack_tq2_0(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    scales_tq2_0(src, stride, nb, to);
    pack_planes(src, NULL, stride, to);
}

// d, dmin and 12 bytes of scales, as in unpack/q4_k.h: four scales to a word.
INLINE void scales_q4_k(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    (void)nb;
    wv h[4];
    qf d, dmin;
    wv_rows(src, stride, h);
    qf_of_pairs(h[0], &d, &dmin);
    const wv s[2] = {h[1] & 0x3f3f3f3fu, low_nibbles(h[3]) | (h[1] >> 2 & 0x30303030u)};
    const wv m[2] = {h[2] & 0x3f3f3f3fu, high_nibbles(h[3]) | (h[2] >> 2 & 0x30303030u)};
    for (int i = 0; i < 8; i++) {
        const int shift = 8 * (i % 4);
        store_s_m(to, i, scaled(d, s[i / 4] >> shift & 255), scaled(dmin, m[i / 4] >> shift & 255));
    }
}

INLINE void pack_q4_k(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    scales_q4_k(src, stride, nb, to);
    for (int i = 0; i < 4; i++) {
        wv w[8];
        wv_rows_32(src + 16 + 32 * i, stride, w);
        for (int j = 0; j < 8; j++) {
            store_q(to, 16 * i + j, low_nibbles(w[j]));
            store_q(to, 16 * i + 8 + j, high_nibbles(w[j]));
        }
    }
}

INLINE void scales_q5_k(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    scales_q4_k(src, stride, nb, to);
}
INLINE void pack_q5_k(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    scales_q5_k(src, stride, nb, to);
    wv h[8];
    wv_rows_32(src + 16, stride, h);
    for (int i = 0; i < 4; i++) {
        wv w[8];
        wv_rows_32(src + 48 + 32 * i, stride, w);
        for (int j = 0; j < 8; j++) {
            const int k = 16 * i + j;
            store_q(to, k, low_nibbles(w[j]) | (h[j] >> 2 * i & 0x01010101u) << 4);
            store_q(to, k + 8, high_nibbles(w[j]) | (h[j] >> (2 * i + 1) & 0x01010101u) << 4);
        }
    }
}

INLINE void scales_q6_k(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    (void)nb;
    qf d = qf_halves(src + 208, stride);
    wv scales[4];
    wv_rows(src + 192, stride, scales);
    for (int g = 0; g < 16; g++) {
        wv scale = ((scales[g / 4] >> 8 * (g % 4) & 255) ^ 128) - 128; // sign extended
        store_s(to, g, scaled(d, scale));
    }
}
INLINE void pack_q6_k(const uint8_t *src, int64_t stride, int nb, const panel *to) {
    scales_q6_k(src, stride, nb, to);
    for (int n = 0; n < 2; n++) { // half a block
        const int k = 32 * n;
        wv h[8], a[8], b[8];
        wv_rows_32(src + 128 + 32 * n, stride, h);
        wv_rows_32(src + 64 * n, stride, a);
        wv_rows_32(src + 64 * n + 32, stride, b);
        for (int j = 0; j < 8; j++) {
            store_q(to, k + j, low_nibbles(a[j]) | (h[j] << 4 & 0x30303030u));
            store_q(to, k + 8 + j, low_nibbles(b[j]) | (h[j] << 2 & 0x30303030u));
            store_q(to, k + 16 + j, high_nibbles(a[j]) | (h[j] & 0x30303030u));
            store_q(to, k + 24 + j, high_nibbles(b[j]) | (h[j] >> 2 & 0x30303030u));
        }
    }
}
#endif

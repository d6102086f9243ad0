// Formats whose blocks name rows of a grid (IQ1, IQ2, IQ3). Part of unpack.cuh.
#ifndef QRT_UNPACK_IQ_CUH
#define QRT_UNPACK_IQ_CUH
#include "grids.cuh"

// Four positive bytes of a grid, those negated whose bit in signs is set: -g is ~g + 1, and no byte
// carries into the next because g is not 0.
INLINE int with_signs(u32 grid, u32 signs) {
    u32 set = ones_of_bits(signs);
    return (int)((grid ^ set * 255) + set);
}
// 8 of them.
INLINE void signed_row(u64 grid, u32 signs, int *q) {
    q[0] = with_signs((u32)grid, signs);
    q[1] = with_signs((u32)(grid >> 32), signs >> 4);
}
// 7 sign bits; the eighth makes their number even.
INLINE u32 even_signs(u32 bits) {
    bits &= 127;
    u32 parity = bits ^ bits >> 4;
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    return bits | (parity & 1) << 7;
}
// Four bytes -8, 0 or 8, each one less or one more.
INLINE int shifted(u32 grid, bool less) {
    u32 more = grid + 0x01010101u;
    return (int)(less ? ((more ^ 0x80808080u) - 0x02020202u) ^ 0x80808080u : more);
}
INLINE void shifted_row(u64 grid, bool less, int *q) {
    q[0] = shifted((u32)grid, less);
    q[1] = shifted((u32)(grid >> 32), less);
}
// Nibbles of a byte are the scales of 16 columns each.
INLINE void iq2_scales(float d, u32 both, Unit &u) {
    u.s[0] = d * (0.5f + (float)(both & 15)) * 0.25f;
    u.s[1] = d * (0.5f + (float)(both >> 4)) * 0.25f;
    no_minima(u);
}

#define BLOCK 256
#define MINIMA 0
#if defined(QRT_IQ2_XXS) // d, for 32 columns 4 grid bytes and a word (4 x 7 signs, scale)
#    define BYTES 66
#    define GROUP 32
INLINE void unpack(const u8 *block, int sub, Unit &u) {
    const u8 *rows = block + 2 + 8 * sub;
    u32 word = word2(rows + 4);
    one_scale(u, half_at(block) * (0.5f + (float)(word >> 28)) * 0.25f, 0);
    for (int k = 0; k < 4; k++)
        signed_row(iq2_xxs_grid[rows[k]], even_signs(word >> 7 * k), u.q + 2 * k);
}

#elif defined(QRT_IQ2_XS) // d, u16[32] (9 grid bits, 7 signs), scales[8]
#    define BYTES 74
#    define GROUP 16
INLINE void unpack(const u8 *block, int sub, Unit &u) {
    iq2_scales(half_at(block), block[66 + sub], u);
    for (int k = 0; k < 4; k++) {
        u32 word = half_word(block + 2 + 8 * sub + 2 * k);
        signed_row(iq2_xs_grid[word & 511], even_signs(word >> 9), u.q + 2 * k);
    }
}

#elif defined(QRT_IQ2_S) // d, qs[32], signs[32], qh[8], scales[8]
#    define BYTES 82
#    define GROUP 16
INLINE void unpack(const u8 *block, int sub, Unit &u) {
    iq2_scales(half_at(block), block[74 + sub], u);
    for (int k = 0; k < 4; k++) {
        int row = 4 * sub + k, index = block[2 + row] | (block[66 + sub] >> 2 * k & 3) << 8;
        signed_row(iq2_s_grid[index], block[34 + row], u.q + 2 * k);
    }
}

#elif defined(QRT_IQ3_XXS) // d, qs[64], u32[8] (4 x 7 signs, scale)
#    define BYTES 98
#    define GROUP 32
INLINE void unpack(const u8 *block, int sub, Unit &u) {
    const u8 *rows = block + 2 + 8 * sub;
    u32 word = word2(block + 66 + 4 * sub);
    one_scale(u, half_at(block) * (0.5f + (float)(word >> 28)) * 0.5f, 0);
    for (int k = 0; k < 4; k++) {
        u32 signs = even_signs(word >> 7 * k);
        u.q[2 * k] = with_signs(iq3_xxs_grid[rows[2 * k]], signs);
        u.q[2 * k + 1] = with_signs(iq3_xxs_grid[rows[2 * k + 1]], signs >> 4);
    }
}

#elif defined(QRT_IQ3_S) // d, qs[64], qh[8], signs[32], scales[4]
#    define BYTES 110
#    define GROUP 32
INLINE void unpack(const u8 *block, int sub, Unit &u) {
    const u8 *rows = block + 2 + 8 * sub, *signs = block + 74 + 4 * sub;
    int high = block[66 + sub], scale = block[106 + sub / 2] >> 4 * (sub % 2) & 15;
    one_scale(u, half_at(block) * (float)(1 + 2 * scale), 0);
    for (int k = 0; k < 8; k++) {
        int index = rows[k] | (high >> k & 1) << 8;
        u.q[k] = with_signs(iq3_s_grid[index], signs[k / 2] >> 4 * (k % 2));
    }
}

#elif defined(QRT_IQ1_S) // d, qs[32], qh u16[8] (4 x 3 grid bits, scale, sign of the shift)
#    define BYTES 50
#    define GROUP 32
INLINE void unpack(const u8 *block, int sub, Unit &u) {
    u32 qh = half_word(block + 34 + 2 * sub);
    one_scale(u, half_at(block) * (float)(2 * (qh >> 12 & 7) + 1) * 0.125f, 0);
    for (int k = 0; k < 4; k++)
        shifted_row(iq1_grid[block[2 + 4 * sub + k] | (qh >> 3 * k & 7) << 8], qh >> 15,
                    u.q + 2 * k);
}

#elif defined(QRT_IQ1_M)
// qs[32], qh[16] (for 8 columns 3 grid bits and the sign of the shift), scales u16[4] (4 x 3 bits;
// their top nibbles together are the float16 d)
#    define BYTES 56
#    define GROUP 16
INLINE void unpack(const u8 *block, int sub, Unit &u) {
    const u8 *scales = block + 48;
    u32 d = 0;
    for (int i = 0; i < 4; i++) d |= half_word(scales + 2 * i) >> 12 << 4 * i;
    no_minima(u);
    for (int h = 0; h < 2; h++) {
        int g = 2 * sub + h, scale = half_word(scales + 2 * (g / 4)) >> 3 * (g % 4) & 7;
        u.s[h] = half_to_float(d) * (float)(2 * scale + 1) * 0.125f;
    }
    for (int k = 0; k < 4; k++) {
        int row = 4 * sub + k, qh = block[32 + row / 2] >> 4 * (row % 2) & 15;
        shifted_row(iq1_grid[block[row] | (qh & 7) << 8], qh >> 3, u.q + 2 * k);
    }
}
#else
#    error "no weight format is named"
#endif
#endif

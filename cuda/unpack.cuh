// Blocks of the quantised weight formats, 32 columns of a row at a time:
//     value[i] = s[i / 16] * q[i] - m[i / 16]
// q: signed bytes, four to a word, in the order of the columns. One format of a module is chosen by
// a macro QRT_<FORMAT>; it defines BLOCK (columns), BYTES, GROUP (columns of a scale: 16 or 32) and
// MINIMA (0: all m are 0). A tensor is aligned to 16 bytes, its blocks to what their size allows.
#ifndef QRT_UNPACK_CUH
#define QRT_UNPACK_CUH
#include "common.cuh"

struct Unit {
    int q[8];
    float s[2], m[2];
};

INLINE u32 half_word(const u8 *p) { return *(const u16 *)p; }
INLINE u32 word2(const u8 *p) { // aligned to 2 bytes
    const u16 *h = (const u16 *)p;
    return h[0] | (u32)h[1] << 16;
}
INLINE u32 word4(const u8 *p) { return *(const u32 *)p; }
INLINE void eight_words(const u8 *p, u32 (&w)[8]) { // aligned to 16 bytes
    const Words a = *(const Words *)p, b = *(const Words *)(p + 16);
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = a.w[j], w[j + 4] = b.w[j];
}
// Words from p on, which is aligned to 2 bytes, by loads of 4: half as many as of 2. Where p is not
// aligned to 4, the two bytes before it are read too.
template <int COUNT> INLINE void words2(const u8 *p, u32 (&w)[COUNT]) {
    const int shift = (int)((u64)p & 2) * 8;
    const u32 *from = (const u32 *)(p - shift / 8);
    u32 low = from[0];
#pragma unroll
    for (int j = 0; j < COUNT - 1; j++) {
        const u32 high = from[j + 1];
        w[j] = (u32)(((u64)high << 32 | low) >> shift);
        low = high;
    }
    w[COUNT - 1] = shift ? low >> 16 | half_word(p + 4 * COUNT - 2) << 16 : low;
}
INLINE float half_at(const u8 *p) { return half_to_float(half_word(p)); }

// Byte by byte, for bytes below 128 and n at most 128: no byte borrows from the next.
INLINE int minus(u32 bytes, u32 n) {
    return (int)(((bytes | 0x80808080u) - n * 0x01010101u) ^ 0x80808080u);
}
INLINE u32 low4(u32 w) { return w & 0x0f0f0f0fu; }
INLINE u32 high4(u32 w) { return w >> 4 & 0x0f0f0f0fu; }
INLINE u32 ones_of_bits(u32 bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

INLINE void one_scale(Unit &u, float s, float m) {
    u.s[0] = u.s[1] = s;
    u.m[0] = u.m[1] = m;
}
INLINE void no_minima(Unit &u) { u.m[0] = u.m[1] = 0; }

// Four bytes below 16 through a table of 16 bytes.
INLINE int lookup(u32 t0, u32 t1, u32 t2, u32 t3, u32 w) {
    u32 n = (w & 15) | (w >> 4 & 0xf0) | (w >> 8 & 0xf00) | (w >> 12 & 0xf000), low = n & 0x7777;
    u32 a = pick_bytes(t0, t1, low), b = pick_bytes(t2, t3, low);
    return (int)pick_bytes(a, b, 0x3210 + ((n & 0x8888) >> 1));
}
INLINE int iq4_lookup(u32 w) {
    return lookup(0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u, w);
}
INLINE int fp4_lookup(u32 w) {
    return lookup(0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu, w);
}

#if defined(QRT_F32) || defined(QRT_F16) || defined(QRT_BF16)
#    define QRT_FLOAT 1
#    if defined(QRT_F32)
#        define BYTES 4
INLINE float value_at(const u8 *row, int i) { return ((const float *)row)[i]; }
INLINE void eight_values(const u8 *row, int i, float (&v)[8]) { // aligned to 16 bytes
    u32 w[8];
    eight_words(row + 4 * (i64)i, w);
    for (int j = 0; j < 8; j++) v[j] = float_of_bits(w[j]);
}
#    else
#        define BYTES 2
INLINE float number_of_bits(u32 h) {
#        if defined(QRT_F16)
    return half_to_float(h);
#        else
    return bf16_to_float(h);
#        endif
}
INLINE float value_at(const u8 *row, int i) { return number_of_bits(((const u16 *)row)[i]); }
INLINE void eight_values(const u8 *row, int i, float (&v)[8]) { // aligned to 16 bytes
    const Words w = *(const Words *)(row + 2 * (i64)i);
    for (int j = 0; j < 4; j++) {
        v[2 * j] = number_of_bits(w.w[j] & 0xffff);
        v[2 * j + 1] = number_of_bits(w.w[j] >> 16);
    }
}
#    endif

#elif defined(QRT_Q4_0) || defined(QRT_Q4_1)
#    define BLOCK 32
#    define GROUP 32
#    if defined(QRT_Q4_0) // d, qs[16]: low nibbles first
#        define BYTES 18
#        define MINIMA 0
#    else // d, m, qs[16]
#        define BYTES 20
#        define MINIMA 1
#    endif
INLINE void unpack(const u8 *block, int, Unit &u) {
#    if MINIMA
    one_scale(u, half_at(block), -half_at(block + 2));
#    else
    one_scale(u, half_at(block), 0);
#    endif
    u32 w[4];
    words2(block + BYTES - 16, w);
    for (int j = 0; j < 4; j++) {
        u.q[j] = MINIMA ? (int)low4(w[j]) : minus(low4(w[j]), 8);
        u.q[j + 4] = MINIMA ? (int)high4(w[j]) : minus(high4(w[j]), 8);
    }
}

#elif defined(QRT_Q5_0) || defined(QRT_Q5_1)
#    define BLOCK 32
#    define GROUP 32
#    if defined(QRT_Q5_0) // d, qh u32, qs[16]: bit j of qh is bit 4 of column j
#        define BYTES 22
#        define MINIMA 0
#    else // d, m, qh u32, qs[16]
#        define BYTES 24
#        define MINIMA 1
#    endif
INLINE void unpack(const u8 *block, int, Unit &u) {
#    if MINIMA
    one_scale(u, half_at(block), -half_at(block + 2));
#    else
    one_scale(u, half_at(block), 0);
#    endif
    u32 w[5]; // the first: bits
    words2(block + BYTES - 20, w);
    for (int j = 0; j < 4; j++) {
        u32 a = low4(w[j + 1]) | ones_of_bits(w[0] >> 4 * j) << 4;
        u32 b = high4(w[j + 1]) | ones_of_bits(w[0] >> (4 * j + 16)) << 4;
        u.q[j] = MINIMA ? (int)a : minus(a, 16);
        u.q[j + 4] = MINIMA ? (int)b : minus(b, 16);
    }
}

#elif defined(QRT_Q8_0) // d, int8 qs[32]
#    define BLOCK 32
#    define BYTES 34
#    define GROUP 32
#    define MINIMA 0
INLINE void unpack(const u8 *block, int, Unit &u) {
    one_scale(u, half_at(block), 0);
    u32 w[8];
    words2(block + 2, w);
    for (int j = 0; j < 8; j++) u.q[j] = (int)w[j];
}

#elif defined(QRT_IQ4_NL) // d, qs[16]
#    define BLOCK 32
#    define BYTES 18
#    define GROUP 32
#    define MINIMA 0
INLINE void unpack(const u8 *block, int, Unit &u) {
    one_scale(u, half_at(block), 0);
    u32 w[4];
    words2(block + 2, w);
    for (int j = 0; j < 4; j++) {
        u.q[j] = iq4_lookup(low4(w[j]));
        u.q[j + 4] = iq4_lookup(high4(w[j]));
    }
}

#elif defined(QRT_MXFP4) // e (E8M0), qs[16]
#    define BLOCK 32
#    define BYTES 17
#    define GROUP 32
#    define MINIMA 0
INLINE void unpack(const u8 *block, int, Unit &u) {
    u32 e = block[0]; // 2^(e - 128), subnormal below 2
    one_scale(u, float_of_bits(e > 1 ? (e - 1) << 23 : 0x200000u << e), 0);
    for (int j = 0; j < 4; j++) {
        const u8 *p = block + 1 + 4 * j;
        u32 w = p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24;
        u.q[j] = fp4_lookup(low4(w));
        u.q[j + 4] = fp4_lookup(high4(w));
    }
}

#elif defined(QRT_NVFP4) // scales[4] (UE4M3), qs[32]: 8 bytes hold 16 columns
#    define BLOCK 64
#    define BYTES 36
#    define GROUP 16
#    define MINIMA 0
INLINE float half_ue4m3(u32 x) { // the sign bit is not used; 0 and the NaN code give 0
    u32 e = x >> 3 & 15, mantissa = x & 7;
    if (x == 0 || x == 127) return 0;
    if (e == 0) return (float)mantissa * 0.0009765625f;
    return float_of_bits((e + 119) << 23 | mantissa << 20);
}
INLINE void unpack(const u8 *block, int sub, Unit &u) {
    no_minima(u);
    for (int h = 0; h < 2; h++) {
        u.s[h] = half_ue4m3(block[2 * sub + h]);
        for (int j = 0; j < 2; j++) {
            u32 w = word4(block + 4 + 16 * sub + 8 * h + 4 * j);
            u.q[4 * h + j] = fp4_lookup(low4(w));
            u.q[4 * h + 2 + j] = fp4_lookup(high4(w));
        }
    }
}

#elif defined(QRT_IQ4_XS) // d, scales_h u16, scales_l[4], qs[128]
#    define BLOCK 256
#    define BYTES 136
#    define GROUP 32
#    define MINIMA 0
INLINE void unpack(const u8 *block, int sub, Unit &u) {
    int low = block[4 + sub / 2] >> 4 * (sub % 2) & 15, high = half_word(block + 2) >> 2 * sub & 3;
    one_scale(u, half_at(block) * (float)((low | high << 4) - 32), 0);
    for (int j = 0; j < 4; j++) {
        u32 w = word4(block + 8 + 16 * sub + 4 * j);
        u.q[j] = iq4_lookup(low4(w));
        u.q[j + 4] = iq4_lookup(high4(w));
    }
}

#elif defined(QRT_Q2_K)
// scales[16], qs[64], d, dmin; 32 bytes of qs hold four planes of 32 columns
#    define BLOCK 256
#    define BYTES 84
#    define GROUP 16
#    define MINIMA 1
INLINE void unpack(const u8 *block, int sub, Unit &u) {
    float d = half_at(block + 80), dmin = half_at(block + 82);
    for (int h = 0; h < 2; h++) {
        int both = block[2 * sub + h];
        u.s[h] = d * (float)(both & 15);
        u.m[h] = dmin * (float)(both >> 4);
    }
    for (int j = 0; j < 8; j++)
        u.q[j] = word4(block + 16 + 32 * (sub / 4) + 4 * j) >> 2 * (sub % 4) & 0x03030303u;
}

#elif defined(QRT_Q3_K) // hmask[32], qs[64], scales[12], d
#    define BLOCK 256
#    define BYTES 110
#    define GROUP 16
#    define MINIMA 0
INLINE void unpack(const u8 *block, int sub, Unit &u) {
    const u8 *scales = block + 96;
    float d = half_at(block + 108);
    no_minima(u);
    for (int h = 0; h < 2; h++) {
        int g = 2 * sub + h, low = g < 8 ? scales[g] & 15 : scales[g - 8] >> 4;
        u.s[h] = d * (float)((low | (scales[8 + g % 4] >> 2 * (g / 4) & 3) << 4) - 32);
    }
    u32 low[8], high[8];
    words2(block + 32 + 32 * (sub / 4), low);
    words2(block, high);
    for (int j = 0; j < 8; j++) {
        u32 w = low[j] >> 2 * (sub % 4) & 0x03030303u;
        u.q[j] = minus(w | (high[j] >> sub & 0x01010101u) << 2, 4);
    }
}

#elif defined(QRT_Q4_K) || defined(QRT_Q5_K)
// d, dmin, scales[12], (Q5_K: qh[32],) qs[128]: 32 bytes hold two sub-blocks, low nibbles first
#    define BLOCK 256
#    define GROUP 32
#    define MINIMA 1
#    if defined(QRT_Q4_K)
#        define BYTES 144
#    else
#        define BYTES 176
#    endif
INLINE void unpack(const u8 *block, int sub, Unit &u) {
    const Words head = *(const Words *)block; // d and dmin, then scales
    const int at = 8 * (sub % 4);
    u32 s, m; // of six bits; those of the last four sub-blocks are in two places
    if (sub < 4) {
        s = head.w[1] >> at & 63, m = head.w[2] >> at & 63;
    } else {
        s = (head.w[3] >> at & 15) | (head.w[1] >> at >> 6 & 3) << 4;
        m = (head.w[3] >> at >> 4 & 15) | (head.w[2] >> at >> 6 & 3) << 4;
    }
    const u32 both = head.w[0];
    one_scale(u, half_to_float(both & 0xffff) * (float)s, half_to_float(both >> 16) * (float)m);
    u32 w[8];
    eight_words(block + BYTES - 128 + 32 * (sub / 2), w);
    for (int j = 0; j < 8; j++) u.q[j] = (int)(w[j] >> 4 * (sub % 2) & 0x0f0f0f0fu);
#    if defined(QRT_Q5_K)
    eight_words(block + 16, w);
    for (int j = 0; j < 8; j++) u.q[j] |= (int)((w[j] >> sub & 0x01010101u) << 4);
#    endif
}

#elif defined(QRT_Q6_K) // ql[128], qh[64], int8 scales[16], d
#    define BLOCK 256
#    define BYTES 210
#    define GROUP 16
#    define MINIMA 0
INLINE void unpack(const u8 *block, int sub, Unit &u) {
    float d = half_at(block + 208);
    no_minima(u);
    for (int h = 0; h < 2; h++) u.s[h] = d * (float)(i8)block[192 + 2 * sub + h];
    // Half a block: columns 0..63 are the low nibbles of 64 bytes, the others the high ones.
    const u8 *ql = block + 64 * (sub / 4) + 32 * (sub % 2), *qh = block + 128 + 32 * (sub / 4);
    u32 low[8], high[8];
    words2(ql, low);
    words2(qh, high);
    for (int j = 0; j < 8; j++) {
        u32 w = low[j] >> 4 * (sub % 4 / 2) & 0x0f0f0f0fu;
        u.q[j] = minus(w | (high[j] >> 2 * (sub % 4) & 0x03030303u) << 4, 32);
    }
}

#elif defined(QRT_TQ2_0) // qs[64], d; planes as in Q2_K
#    define BLOCK 256
#    define BYTES 66
#    define GROUP 32
#    define MINIMA 0
INLINE void unpack(const u8 *block, int sub, Unit &u) {
    one_scale(u, half_at(block + 64), 0);
    u32 w[8];
    words2(block + 32 * (sub / 4), w);
    for (int j = 0; j < 8; j++) u.q[j] = minus(w[j] >> 2 * (sub % 4) & 0x03030303u, 1);
}

#elif defined(QRT_TQ1_0)
// qs[48], qh[4], d; a byte is a fraction of 256 with five (qh: four) base-3 digits
#    define BLOCK 256
#    define BYTES 54
#    define GROUP 32
#    define MINIMA 0
INLINE u32 base3_digit(u32 byte, int digit) {
    u32 power = (u32)(0x511b090301ull >> 8 * digit) & 255; // 3^digit
    return (byte * power & 255) * 3 >> 8;
}
INLINE void unpack(const u8 *block, int sub, Unit &u) {
    one_scale(u, half_at(block + 52), 0);
    for (int j = 0; j < 8; j++) {
        u32 w = 0;
        for (int i = 0; i < 4; i++) {
            int column = 32 * sub + 4 * j + i, digit = sub, at = 4 * j + i;
            if (column >= 240) {
                digit = (column - 240) / 4, at = 48 + column % 4;
            } else if (column >= 160) {
                digit = (column - 160) / 16, at = 32 + column % 16;
            }
            w |= base3_digit(block[at], digit) << 8 * i;
        }
        u.q[j] = minus(w, 1);
    }
}
#else
#    include "unpack_iq.cuh"
#endif

#ifndef QRT_FLOAT
// Unit number n of a row.
INLINE void unpack_unit(const u8 *row, int n, Unit &u) {
    unpack(row + (i64)(n / (BLOCK / 32)) * BYTES, n % (BLOCK / 32), u);
}
#endif
#endif

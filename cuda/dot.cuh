// Products of weight rows with rows of x: a warp works on ROWS_OF_WARP weight rows and on NX rows
// of x. The order of a sum depends on neither number, so a row's result is the same in any step.
// dot_rows gives a lane the product of w[i % NR] with x[i / NR], i = lane / (32 / (NR * NX)).
#ifndef QRT_DOT_CUH
#define QRT_DOT_CUH
#include "unpack.cuh"

#define WARPS 4
#define ROWS_OF_WARP 2

#ifdef QRT_FLOAT
typedef float input; // x: [rows][cols] float32
INLINE i64 input_width(int cols) { return cols; }

template <int NR, int NX>
INLINE float dot_rows(const u8 *const (&w)[NR], const input *const (&x)[NX], int cols) {
    float sum[NX * NR];
#    pragma unroll
    for (int i = 0; i < NX * NR; i++) sum[i] = 0;
    if (cols % 8 == 0) { // a lane takes eight columns at once: rows begin where 16 bytes do
        for (int i = threadIdx.x % 32 * 8; i < cols; i += 256) {
            float v[NR][8];
#    pragma unroll
            for (int r = 0; r < NR; r++) eight_values(w[r], i, v[r]);
#    pragma unroll
            for (int n = 0; n < NX; n++) {
                u32 a[8];
                eight_words((const u8 *)(x[n] + i), a);
#    pragma unroll
                for (int j = 0; j < 8; j++)
#    pragma unroll
                    for (int r = 0; r < NR; r++)
                        sum[n * NR + r] = fmaf(v[r][j], float_of_bits(a[j]), sum[n * NR + r]);
            }
        }
        return warp_sums(sum);
    }
    for (int i = threadIdx.x % 32; i < cols; i += 32) {
        float v[NR];
#    pragma unroll
        for (int r = 0; r < NR; r++) v[r] = value_at(w[r], i);
#    pragma unroll
        for (int n = 0; n < NX; n++) {
            float a = x[n][i];
#    pragma unroll
            for (int r = 0; r < NR; r++) sum[n * NR + r] = fmaf(v[r], a, sum[n * NR + r]);
        }
    }
    return warp_sums(sum);
}
#else
typedef Quants input; // x: [rows][cols / 32]
INLINE i64 input_width(int cols) { return cols / 32; }

// 32 columns: d_x * s * (q_w . q_x) - m * (sum of x), by halves where a scale serves 16
INLINE float unit_product(const Unit &w, const int (&q)[8], float d, const float (&s)[2],
                          float sum) {
    int a = 0, b = 0;
#    pragma unroll
    for (int j = 0; j < 4; j++) {
        a = dot4(w.q[j], q[j], a);
        b = dot4(w.q[j + 4], q[j + 4], b);
    }
    if (GROUP == 32) {
        sum = fmaf(d * w.s[0], (float)(a + b), sum);
        if (MINIMA) sum = fmaf(-w.m[0], s[0] + s[1], sum);
    } else {
        sum = fmaf(d * w.s[0], (float)a, sum);
        sum = fmaf(d * w.s[1], (float)b, sum);
        if (MINIMA) sum = fmaf(-w.m[0], s[0], sum);
        if (MINIMA) sum = fmaf(-w.m[1], s[1], sum);
    }
    return sum;
}

template <int NR, int NX>
INLINE float dot_rows(const u8 *const (&w)[NR], const input *const (&x)[NX], int cols) {
    float sum[NX * NR];
#    pragma unroll
    for (int i = 0; i < NX * NR; i++) sum[i] = 0;
    for (int i = threadIdx.x % 32; i < cols / 32; i += 32) {
        Unit u[NR];
#    pragma unroll
        for (int r = 0; r < NR; r++) unpack_unit(w[r], i, u[r]);
#    pragma unroll
        for (int n = 0; n < NX; n++) {
            Quants v = x[n][i];
#    pragma unroll
            for (int r = 0; r < NR; r++)
                sum[n * NR + r] = unit_product(u[r], v.q, v.d, v.s, sum[n * NR + r]);
        }
    }
    return warp_sums(sum);
}
#endif
#endif

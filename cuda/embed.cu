// embed: rows of the table, dequantised.
#include "unpack.cuh"

// table: [n_vocab][row bytes]   out: [T][cols]   grid: units / 128 (float formats: cols / 128), T
extern "C" __global__ void __launch_bounds__(128)
    embed(const u8 *table, const float *scale, float *out, const int *step, int cols,
          int row_bytes) {
    int t = blockIdx.y, n = blockIdx.x * 128 + threadIdx.x;
    if (t >= step[N_ROWS]) return;
    const u8 *row = table + (i64)section(step, AT_TOKENS)[t] * row_bytes;
    float factor = scale ? scale[0] : 1.0f, *to = out + (i64)t * cols;
#ifdef QRT_FLOAT
    if (n < cols) to[n] = value_at(row, n) * factor;
#else
    if (n >= cols / 32) return;
    Unit u;
    unpack_unit(row, n, u);
#    pragma unroll
    for (int j = 0; j < 8; j++) {
#    pragma unroll
        for (int i = 0; i < 4; i++) {
            int q = (i8)(u.q[j] >> 8 * i);
            to[32 * n + 4 * j + i] = (u.s[j / 4] * (float)q - u.m[j / 4]) * factor;
        }
    }
#endif
}

// linear: out = x @ w.T * scale, for up to 8 rows of x at a time.
#include "dot.cuh"

// w: [rows][row bytes]   x: [T][cols], float32 or quantised   out: [T][rows]
// grid: weight rows / (WARPS * ROWS_OF_WARP), T / NX
template <int NX>
INLINE void linear(const u8 *w, const float *scale, const input *x, float *out, const int *step,
                   int count, int rows, int cols, int row_bytes) {
    int n = step[count], t = blockIdx.y * NX;
    int row = (blockIdx.x * WARPS + threadIdx.x / 32) * ROWS_OF_WARP;
    if (t >= n || row >= rows) return; // the same for all lanes of a warp
    const u8 *weights[ROWS_OF_WARP];
    const input *inputs[NX];
#pragma unroll
    for (int r = 0; r < ROWS_OF_WARP; r++)
        weights[r] = w + (i64)(row + r < rows ? row + r : row) * row_bytes;
#pragma unroll
    for (int i = 0; i < NX; i++) inputs[i] = x + (i64)(t + i < n ? t + i : t) * input_width(cols);
    float sum[ROWS_OF_WARP][NX];
    dot_rows(weights, inputs, cols, sum);
    float factor = scale ? scale[0] : 1.0f;
    if (threadIdx.x % 32) return;
#pragma unroll
    for (int i = 0; i < NX; i++)
#pragma unroll
        for (int r = 0; r < ROWS_OF_WARP; r++)
            if (t + i < n && row + r < rows)
                out[(i64)(t + i) * rows + row + r] = sum[r][i] * factor;
}

extern "C" __global__ void __launch_bounds__(128)
    linear_1(const u8 *w, const float *scale, const input *x, float *out, const int *step,
             int count, int rows, int cols, int row_bytes) {
    linear<1>(w, scale, x, out, step, count, rows, cols, row_bytes);
}
extern "C" __global__ void __launch_bounds__(128)
    linear_2(const u8 *w, const float *scale, const input *x, float *out, const int *step,
             int count, int rows, int cols, int row_bytes) {
    linear<2>(w, scale, x, out, step, count, rows, cols, row_bytes);
}
extern "C" __global__ void __launch_bounds__(128)
    linear_4(const u8 *w, const float *scale, const input *x, float *out, const int *step,
             int count, int rows, int cols, int row_bytes) {
    linear<4>(w, scale, x, out, step, count, rows, cols, row_bytes);
}
extern "C" __global__ void __launch_bounds__(128)
    linear_8(const u8 *w, const float *scale, const input *x, float *out, const int *step,
             int count, int rows, int cols, int row_bytes) {
    linear<8>(w, scale, x, out, step, count, rows, cols, row_bytes);
}

// linear: out = x @ w.T * scale (+ residual), for up to 8 rows of x at a time.
#include "dot.cuh"
#include "parts.cuh"

// w: [rows][row bytes] of each part   x: [T][cols], float32 or quantised   out: [T][rows]
// grid: the parts' blocks of WARPS * ROWS_OF_WARP weight rows, T / NX
template <int NX>
INLINE void linear(Part part, int block, const input *x, const int *step, int count, int cols,
                   int row_bytes) {
    int n = step[count], t = blockIdx.y * NX, rows = part.rows;
    int row = (block * WARPS + threadIdx.x / 32) * ROWS_OF_WARP;
    if (t >= n || row >= rows) return; // the same for all lanes of a warp
    const u8 *weights[ROWS_OF_WARP];
    const input *inputs[NX];
#pragma unroll
    for (int r = 0; r < ROWS_OF_WARP; r++)
        weights[r] = part.w + (i64)(row + r < rows ? row + r : row) * row_bytes;
#pragma unroll
    for (int i = 0; i < NX; i++) inputs[i] = x + (i64)(t + i < n ? t + i : t) * input_width(cols);
    float sum = dot_rows(weights, inputs, cols);
    const int lane = threadIdx.x % 32, lanes = 32 / (ROWS_OF_WARP * NX);
    int i = lane / lanes / ROWS_OF_WARP, r = lane / lanes % ROWS_OF_WARP;
    if (lane % lanes == 0 && t + i < n && row + r < rows) store(part, t + i, row + r, sum);
}

#define LINEAR(NX)                                                                                 \
    extern "C" __global__ void __launch_bounds__(128)                                              \
        linear_##NX(PARTS, const input *x, const int *step, int count, int cols, int row_bytes) {  \
        int block = blockIdx.x;                                                                    \
        Part part = part_of(block, WARPS * ROWS_OF_WARP, PARTS_GIVEN);                             \
        linear<NX>(part, block, x, step, count, cols, row_bytes);                                  \
    }
LINEAR(1)
LINEAR(2)
LINEAR(4)
LINEAR(8)

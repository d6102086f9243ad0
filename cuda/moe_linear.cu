// moe_linear: products with the experts that a row's route names.
#include "dot.cuh"
#include "experts.cuh"

// A row of expert e with one row of x, scaled; scales: NULL, or one for all experts or for each.
INLINE float expert_product(const u8 *w, const float *scale, int scales, const input *x, int e,
                            int row, int rows, int cols, int row_bytes) {
    const u8 *weights[1] = {w + ((i64)e * rows + row) * row_bytes};
    const input *inputs[1] = {x};
    float sum = dot_rows(weights, inputs, cols);
    return scale ? sum * scale[scales > 1 ? e : 0] : sum;
}

// x: [T][cols]   route: [T][2 * used]   out: [T][used][rows]   grid: rows / WARPS, T, used
extern "C" __global__ void __launch_bounds__(128)
    moe_linear(const u8 *w, const float *scale, const input *x, const float *route, float *out,
               const int *step, int experts, int scales, int used, int rows, int cols,
               int row_bytes) {
    int t = blockIdx.y, i = blockIdx.z, row = blockIdx.x * WARPS + threadIdx.x / 32;
    if (t >= step[N_ROWS] || row >= rows) return;
    int e = expert_of(route + (i64)t * 2 * used, i, experts);
    float y =
        expert_product(w, scale, scales, x + t * input_width(cols), e, row, rows, cols, row_bytes);
    if (threadIdx.x % 32 == 0) out[((i64)t * used + i) * rows + row] = y;
}

// x: [T][used][cols]   out: [T][rows], the experts' products weighted and summed in list order
// grid: rows / WARPS, T
extern "C" __global__ void __launch_bounds__(128)
    moe_linear_reduce(const u8 *w, const float *scale, const input *x, const float *route,
                      float *out, const int *step, int experts, int scales, int used, int rows,
                      int cols, int row_bytes) {
    int t = blockIdx.y, row = blockIdx.x * WARPS + threadIdx.x / 32;
    if (t >= step[N_ROWS] || row >= rows) return;
    const float *own = route + (i64)t * 2 * used;
    float total = 0;
    for (int i = 0; i < used; i++) {
        const input *from = x + ((i64)t * used + i) * input_width(cols);
        float y = expert_product(w, scale, scales, from, expert_of(own, i, experts), row, rows,
                                 cols, row_bytes);
        total = fmaf(own[used + i], y, total);
    }
    if (threadIdx.x % 32 == 0) out[(i64)t * rows + row] = total;
}

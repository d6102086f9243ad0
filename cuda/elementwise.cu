// silu_mul, sigmoid_mul, add, delta_gates, gather_rows: a thread for each output column.
#include "quants.cuh"

// Column c of a view whose heads lie stride apart.
INLINE int column(int c, int offset, int dim, int stride) {
    return offset + c / dim * stride + c % dim;
}

enum { SILU_MUL, SIGMOID_MUL, ADD };

// a: [T, heads, dim]   b: the same, or one column for the whole row (width 1)   out: [T][cols]
// quants: NULL, or out as blocks (cols a multiple of 32)   grid: cols / 128, T
template <int KIND>
INLINE void combine(const float *a, int a_ld, int a_offset, int a_dim, int a_stride, const float *b,
                    int b_ld, int b_offset, int b_dim, int b_stride, int b_width, float *out,
                    Quants *quants, const int *step, int count, int cols) {
    int t = blockIdx.y, c = blockIdx.x * 128 + threadIdx.x;
    if (t >= step[count] || c >= cols) return;
    float x = a[(i64)t * a_ld + column(c, a_offset, a_dim, a_stride)];
    float y = b[(i64)t * b_ld + column(b_width == 1 ? 0 : c, b_offset, b_dim, b_stride)];
    float z = KIND == SILU_MUL ? silu(x) * y : KIND == SIGMOID_MUL ? x * sigmoid(y) : x + y;
    out[(i64)t * cols + c] = z;
    if (quants) quantize_warp(z, quants + ((i64)t * cols + c) / 32);
}

extern "C" __global__ void __launch_bounds__(128)
    silu_mul(const float *a, int a_ld, int a_offset, int a_dim, int a_stride, const float *b,
             int b_ld, int b_offset, int b_dim, int b_stride, int b_width, float *out,
             Quants *quants, const int *step, int count, int cols) {
    combine<SILU_MUL>(a, a_ld, a_offset, a_dim, a_stride, b, b_ld, b_offset, b_dim, b_stride,
                      b_width, out, quants, step, count, cols);
}
extern "C" __global__ void __launch_bounds__(128)
    sigmoid_mul(const float *a, int a_ld, int a_offset, int a_dim, int a_stride, const float *b,
                int b_ld, int b_offset, int b_dim, int b_stride, int b_width, float *out,
                Quants *quants, const int *step, int count, int cols) {
    combine<SIGMOID_MUL>(a, a_ld, a_offset, a_dim, a_stride, b, b_ld, b_offset, b_dim, b_stride,
                         b_width, out, quants, step, count, cols);
}
extern "C" __global__ void __launch_bounds__(128)
    add(const float *a, int a_ld, int a_offset, int a_dim, int a_stride, const float *b, int b_ld,
        int b_offset, int b_dim, int b_stride, int b_width, float *out, Quants *quants,
        const int *step, int count, int cols) {
    combine<ADD>(a, a_ld, a_offset, a_dim, a_stride, b, b_ld, b_offset, b_dim, b_stride, b_width,
                 out, quants, step, count, cols);
}

// a, b: [T][heads]   out: [T][2 * heads], softplus(a + dt_bias) * a_log, then sigmoid(b)
// grid: heads / 128, T
extern "C" __global__ void __launch_bounds__(128)
    delta_gates(const float *a, int a_ld, int a_offset, const float *b, int b_ld, int b_offset,
                const float *dt_bias, const float *a_log, float *out, const int *step, int count,
                int heads) {
    int t = blockIdx.y, h = blockIdx.x * 128 + threadIdx.x;
    if (t >= step[count] || h >= heads) return;
    float v = a[(i64)t * a_ld + a_offset + h] + dt_bias[h];
    float soft = v > 0 ? v + log1pf(expf(-v)) : log1pf(expf(v)); // without overflow
    float *to = out + (i64)t * 2 * heads + h;
    to[0] = soft * a_log[h];
    to[heads] = sigmoid(b[(i64)t * b_ld + b_offset + h]);
}

// x: [T][ld]   out: [outs][cols], the rows whose logits are wanted   grid: cols / 128, outs
extern "C" __global__ void __launch_bounds__(128)
    gather_rows(const float *x, int ld, float *out, const int *step, int cols) {
    int i = blockIdx.y, c = blockIdx.x * 128 + threadIdx.x;
    if (i >= step[N_OUTS] || c >= cols) return;
    out[(i64)i * cols + c] = x[(i64)section(step, AT_OUTS)[i] * ld + c];
}

// rms_norm, gated_rms_norm, l2_norm: per head of a view; a block of any number of warps each.
#include "quants.cuh"

// Sum of squares of x[dim] over the block.
INLINE float sum_of_squares(const float *x, int dim) {
    QRT_DYN_SMEM(float, part);
    float sum = 0;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) sum = fmaf(x[i], x[i], sum);
    return block_sum(sum, part);
}

// x: [T, heads, dim], element (t, h, d) at t * ld + offset + h * stride + d   w: [dim]
// out: [T, heads * dim]   quants: NULL, or out as blocks (dim a multiple of 32)
// grid: heads, T   shared: a float for each warp
extern "C" __global__ void __launch_bounds__(256)
    rms_norm(const float *x, int ld, int offset, int stride, int dim, const float *w, float *out,
             Quants *quants, const int *step, int count, float eps) {
    int h = blockIdx.x, t = blockIdx.y;
    if (t >= step[count]) return;
    const float *from = x + (i64)t * ld + offset + h * stride;
    float *to = out + ((i64)t * gridDim.x + h) * dim;
    float s = 1.0f / sqrtf(sum_of_squares(from, dim) / (float)dim + eps);
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        float y = from[i] * s * w[i];
        to[i] = y;
        if (quants) quantize_warp(y, quants + (((i64)t * gridDim.x + h) * dim + i) / 32);
    }
}

// z: as x   out = rms_norm(x) * w * silu(z)
extern "C" __global__ void __launch_bounds__(256)
    gated_rms_norm(const float *x, int ld, int offset, int stride, int dim, const float *z,
                   int z_ld, int z_offset, int z_stride, const float *w, float *out, Quants *quants,
                   const int *step, int count, float eps) {
    int h = blockIdx.x, t = blockIdx.y;
    if (t >= step[count]) return;
    const float *from = x + (i64)t * ld + offset + h * stride;
    const float *gate = z + (i64)t * z_ld + z_offset + h * z_stride;
    float *to = out + ((i64)t * gridDim.x + h) * dim;
    float s = 1.0f / sqrtf(sum_of_squares(from, dim) / (float)dim + eps);
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        float y = from[i] * s * w[i] * silu(gate[i]);
        to[i] = y;
        if (quants) quantize_warp(y, quants + (((i64)t * gridDim.x + h) * dim + i) / 32);
    }
}

// out = x / sqrt(sum of squares + 1e-6) * scale
extern "C" __global__ void __launch_bounds__(256)
    l2_norm(const float *x, int ld, int offset, int stride, int dim, float *out, const int *step,
            int count, float scale) {
    int h = blockIdx.x, t = blockIdx.y;
    if (t >= step[count]) return;
    const float *from = x + (i64)t * ld + offset + h * stride;
    float *to = out + ((i64)t * gridDim.x + h) * dim;
    float s = scale / sqrtf(sum_of_squares(from, dim) + 1e-6f);
    for (int i = threadIdx.x; i < dim; i += blockDim.x) to[i] = from[i] * s;
}

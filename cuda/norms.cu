// rms_norm, gated_rms_norm, l2_norm: per head of a view; a block of any number of warps each.
#include "heads.cuh"
#include "quants.cuh"

// Sum of squares of x[dim] over the block.
INLINE float sum_of_squares(const float *x, int dim) {
    QRT_DYN_SMEM(float, part);
    float sum = 0;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) sum = fmaf(x[i], x[i], sum);
    return block_sum(sum, part);
}

INLINE float one_over_rms(const float *x, int dim, float eps) {
    return 1.0f / sqrtf(sum_of_squares(x, dim) / (float)dim + eps);
}

// w: [dim] of each view   quants: NULL, or the first view's out as blocks (dim a multiple of 32)
// grid: heads of both views, T   shared: a float for each warp
extern "C" __global__ void __launch_bounds__(256)
    rms_norm(HEADS(0), const float *w0, HEADS(1), const float *w1, int dim, Quants *quants,
             const int *step, int count, float eps) {
    const Heads first = HEADS_GIVEN(0), second = HEADS_GIVEN(1);
    const bool one = (int)blockIdx.x < heads0;
    const Heads v = one ? first : second;
    const float *w = one ? w0 : w1;
    const int t = blockIdx.y, h = one ? blockIdx.x : blockIdx.x - heads0;
    if (t >= step[count]) return;
    const float *from = head_of(v, t, h);
    float *to = out_of(v, t, h, dim), s = one_over_rms(from, dim, eps);
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        float y = from[i] * s * w[i];
        to[i] = y;
        if (quants) quantize_warp(y, quants + (((i64)t * v.heads + h) * dim + i) / 32);
    }
}

// z: as x   out = rms_norm(x) * w * silu(z)
extern "C" __global__ void __launch_bounds__(256)
    gated_rms_norm(HEADS(0), const float *z, int z_ld, int z_offset, int z_stride, const float *w,
                   int dim, Quants *quants, const int *step, int count, float eps) {
    const Heads v = HEADS_GIVEN(0);
    const int h = blockIdx.x, t = blockIdx.y;
    if (t >= step[count]) return;
    const float *from = head_of(v, t, h), *gate = z + (i64)t * z_ld + z_offset + h * z_stride;
    float *to = out_of(v, t, h, dim), s = one_over_rms(from, dim, eps);
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        float y = from[i] * s * w[i] * silu(gate[i]);
        to[i] = y;
        if (quants) quantize_warp(y, quants + (((i64)t * v.heads + h) * dim + i) / 32);
    }
}

// out = x / sqrt(sum of squares + 1e-6) * scale   grid: heads of both views, T
extern "C" __global__ void __launch_bounds__(256)
    l2_norm(HEADS(0), float scale0, HEADS(1), float scale1, int dim, const int *step, int count) {
    const Heads first = HEADS_GIVEN(0), second = HEADS_GIVEN(1);
    const bool one = (int)blockIdx.x < heads0;
    const Heads v = one ? first : second;
    const int t = blockIdx.y, h = one ? blockIdx.x : blockIdx.x - heads0;
    if (t >= step[count]) return;
    const float *from = head_of(v, t, h);
    float *to = out_of(v, t, h, dim);
    float s = (one ? scale0 : scale1) / sqrtf(sum_of_squares(from, dim) + 1e-6f);
    for (int i = threadIdx.x; i < dim; i += blockDim.x) to[i] = from[i] * s;
}

// rope: rotates the first columns of each head by the row's three-axis position; copies the rest.
#include "heads.cuh"

// Cosine and sine of an angle below 2^20, exact to float32: the quarter turns are taken off in
// double, in two parts of which the first has so few bits that its product is exact.
INLINE void rotation(double angle, float *cosine, float *sine) {
    double n = rint(angle * 0.63661977236758134);
    double rest = (angle - n * 1.5707963267341256) - n * 6.0771005065061922e-11;
    float r = (float)rest, s = r * r;
    float si = 2.7557319e-6f, co = -2.7557319e-7f;
    si = fmaf(si, s, -1.9841270e-4f), co = fmaf(co, s, 2.4801587e-5f);
    si = fmaf(si, s, 8.3333333e-3f), co = fmaf(co, s, -1.3888889e-3f);
    si = fmaf(si, s, -1.6666667e-1f), co = fmaf(co, s, 4.1666667e-2f);
    si = fmaf(si * s, r, r), co = fmaf(fmaf(co, s, -0.5f), s, 1.0f);
    int quarter = (int)n & 3;
    float a = quarter & 1 ? si : co, b = quarter & 1 ? co : si;
    *cosine = quarter == 1 || quarter == 2 ? -a : a;
    *sine = quarter & 2 ? -b : b;
}

// turns: [rot / 2] radians for one position; pair j takes the axis j % 3 while j < limits of that
// axis   grid: heads of both views * dim / 128, T
extern "C" __global__ void __launch_bounds__(128)
    rope(HEADS(0), HEADS(1), int dim, const double *turns, int rot, int limit1, int limit2,
         const int *step) {
    const Heads first = HEADS_GIVEN(0), second = HEADS_GIVEN(1);
    const int t = blockIdx.y, c = blockIdx.x * 128 + threadIdx.x, rows = step[N_ROWS];
    if (t >= rows || c >= (heads0 + heads1) * dim) return;
    const int d = c % dim, half = rot / 2;
    const bool one = c / dim < heads0;
    const Heads v = one ? first : second;
    const int h = one ? c / dim : c / dim - heads0;
    const float *from = head_of(v, t, h);
    float y = from[d];
    if (d < rot) {
        int j = d % half, axis = j % 3;
        if ((axis == 1 && j >= limit1) || (axis == 2 && j >= limit2)) axis = 0;
        float cosine, sine;
        rotation((double)section(step, AT_POSITION)[axis * rows + t] * turns[j], &cosine, &sine);
        float other = from[d < half ? d + half : d - half];
        y = fmaf(d < half ? -other : other, sine, y * cosine);
    }
    out_of(v, t, h, dim)[d] = y;
}

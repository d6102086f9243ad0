// conv1d_silu: causal depthwise convolution with the conv state, then SiLU.
// state: [slot][layers][channels][taps - 1] float32, oldest first
#include "common.cuh"

#define MAX_TAPS 8
#define TILE 32 // rows of a block

// What a channel of one sequence sees.
struct Channel {
    const float *x;     // its first row of the step
    i64 ld;             // between rows
    const float *state; // NULL: zeros
    int taps;
};

// The input of row t of the sequence's part of the step; rows before it are in the state.
INLINE float input_at(const Channel &c, int t) {
    if (t >= 0) return c.x[t * c.ld];
    return c.state ? c.state[c.taps - 1 + t] : 0;
}

INLINE i64 state_at(int slot, int layers, int layer, int channels, int channel, int taps) {
    return (((i64)slot * layers + layer) * channels + channel) * (taps - 1);
}

INLINE Channel channel_of(const float *x, int channels, const float *state, const int *step, int s,
                          int layers, int layer, int channel, int taps) {
    int first = section(step, AT_OFFSETS)[s];
    const float *own =
        state + state_at(section(step, AT_SOURCES)[s], layers, layer, channels, channel, taps);
    Channel c = {x + (i64)first * channels + channel, channels,
                 section(step, AT_STARTS)[s] ? own : (const float *)0, taps};
    return c;
}

// The state behind the first `rows` rows, read before anything is written: source may be target.
INLINE void keep_state(const Channel &c, int rows, float *to) {
    float last[MAX_TAPS];
#pragma unroll
    for (int k = 0; k < MAX_TAPS - 1; k++)
        if (k < c.taps - 1) last[k] = input_at(c, rows - (c.taps - 1) + k);
#pragma unroll
    for (int k = 0; k < MAX_TAPS - 1; k++)
        if (k < c.taps - 1) to[k] = last[k];
}

// Saved states first: the slot's own may replace what they are read from.
INLINE void keep_states(const Channel &c, float *state, const int *step, int s, int layers,
                        int layer, int channels, int channel) {
    const int *offsets = section(step, AT_OFFSETS);
    const int *rows = section(step, AT_SAVES), *slots = section(step, AT_SAVED);
    for (int i = 0; i < step[N_SAVES]; i++) {
        if (rows[i] < offsets[s] || rows[i] >= offsets[s + 1]) continue;
        keep_state(c, rows[i] - offsets[s] + 1,
                   state + state_at(slots[i], layers, layer, channels, channel, c.taps));
    }
    keep_state(c, offsets[s + 1] - offsets[s],
               state +
                   state_at(section(step, AT_SLOTS)[s], layers, layer, channels, channel, c.taps));
}

// x, out: [T][channels]   w: [channels][taps], newest last   keep: the state is written too, for
// steps of which no sequence has more than TILE rows   grid: channels / 128, seqs, tiles of rows
// 8 blocks of a multiprocessor: otherwise the compiler keeps to 40 registers on sm_90, and spills
extern "C" __global__ void __launch_bounds__(128, 8)
    conv1d_silu(const float *x, const float *w, float *state, float *out, const int *step,
                int layers, int layer, int channels, int taps, int keep) {
    int channel = blockIdx.x * 128 + threadIdx.x, s = blockIdx.y, begin = blockIdx.z * TILE;
    if (s >= step[N_SEQS] || channel >= channels) return;
    int first = section(step, AT_OFFSETS)[s], rows = section(step, AT_OFFSETS)[s + 1] - first;
    if (begin >= rows) return;
    Channel c = channel_of(x, channels, state, step, s, layers, layer, channel, taps);
    float weight[MAX_TAPS], window[MAX_TAPS]; // the newest last
#pragma unroll
    for (int k = 0; k < MAX_TAPS; k++) {
        int back = MAX_TAPS - 1 - k; // rows before the newest
        weight[k] = back < taps ? w[channel * taps + taps - 1 - back] : 0;
        window[k] = back > 0 && back < taps ? input_at(c, begin - back) : 0;
    }
    int end = begin + TILE < rows ? begin + TILE : rows;
    for (int t = begin; t < end; t++) {
        window[MAX_TAPS - 1] = c.x[t * c.ld];
        float sum = 0;
#pragma unroll
        for (int k = 0; k < MAX_TAPS; k++) sum = fmaf(window[k], weight[k], sum);
        out[(i64)(first + t) * channels + channel] = silu(sum);
#pragma unroll
        for (int k = 0; k < MAX_TAPS - 1; k++) window[k] = window[k + 1];
    }
    if (keep) keep_states(c, state, step, s, layers, layer, channels, channel);
}

// What conv1d_silu leaves out without keep.   grid: channels / 128, seqs
extern "C" __global__ void __launch_bounds__(128)
    conv1d_keep(const float *x, float *state, const int *step, int layers, int layer, int channels,
                int taps) {
    int channel = blockIdx.x * 128 + threadIdx.x, s = blockIdx.y;
    if (s >= step[N_SEQS] || channel >= channels) return;
    Channel c = channel_of(x, channels, state, step, s, layers, layer, channel, taps);
    keep_states(c, state, step, s, layers, layer, channels, channel);
}

// delta_net for sequences of many rows, CHUNK rows at once. With G_i the sum of the log decays up
// to row i of a chunk and S the state before it (values by keys), the corrections u of the
// recurrence (delta_net.cu) solve a unit triangular system:
//     u_i + beta_i sum_{j < i} e^(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - e^G_i S k_i)
// delta_prepare takes chunks in any order: X = the inverse of the system times beta, and
// Y_ij = e^(G_i - G_j) (q_i . k_j). delta_walk takes them in their order, for some rows of S:
//     u = X (v - e^G S k)    out = e^G S q + Y u    S <- e^G_last S + sum_j e^(G_last - G_j) u_j
//     k_j
// Decays between two rows are sums of the gates between them, not differences of sums from the
// chunk's begin, which cancel behind a strong decay; products of them can only vanish.
// Chunks begin where the sequence's part of the step does; a state saved inside one is its sum up
// to there, so that saving changes no bit of anything else.
#include "common.cuh"

#define CHUNK 32
#define VALUES 16             // rows of S, in a block of delta_walk
#define SQUARE_LD (CHUNK + 4) // of CHUNK x CHUNK numbers in shared memory
#define ROOM (2 * CHUNK)      // numbers of a row and head: of X and of Y
#define STATE_SLOT(s) ((i64)(s) * layers * heads * d * d)

struct __align__(16) Four {
    float x[4];
};
struct __align__(8) Two {
    float x[2];
};

// A head of q or k, all rows of the step.
struct Rows {
    const float *x;
    int ld, d;
    bool wide; // rows begin where 16 bytes do
};

INLINE Rows rows_of(const float *x, int ld, int offset, int stride, int head, int d) {
    Rows r = {x + offset + (i64)head * stride, ld, d, (ld | offset | stride | d) % 4 == 0};
    return r;
}

// n rows from row t on to [CHUNK][ld], zeros behind them and behind d columns.
INLINE void load_rows(const Rows &r, int t, int n, float *to, int ld) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (r.wide) {
#pragma unroll 4
        for (int i = warp; i < CHUNK; i += 4)
            for (int c = 4 * lane; c < r.d; c += 128) {
                Four x = {{0, 0, 0, 0}};
                if (i < n) x = *(const Four *)(r.x + (i64)(t + i) * r.ld + c);
                *(Four *)(to + i * ld + c) = x;
            }
        return;
    }
    for (int i = warp; i < CHUNK; i += 4)
        for (int c = lane; c < ld; c += 32)
            to[i * ld + c] = i < n && c < r.d ? r.x[(i64)(t + i) * r.ld + c] : 0;
}

INLINE Four four_at(const float *x) { return *(const Four *)x; }
INLINE float dot(const Four &a, const Four &b, float sum) {
#pragma unroll
    for (int i = 0; i < 4; i++) sum = fmaf(a.x[i], b.x[i], sum);
    return sum;
}

// Of lane j, e^(g_{j + 1} + .. + g_last); g: of a lane's own row.
INLINE float decay_behind(float g, int last) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        float next = __shfl_sync(ALL_LANES, g, i);
        if (i > (int)threadIdx.x % 32 && i <= last) sum += next;
    }
    return expf(sum);
}

// Of lane i, e^(g_0 + .. + g_i).
INLINE float decay_up_to(float g) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        float next = __shfl_sync(ALL_LANES, g, i);
        if (i <= (int)threadIdx.x % 32) sum += next;
    }
    return expf(sum);
}

// q, k: [T, key heads, d] views   gates: [T, 2 * heads], log decays, then betas
// room: [T, heads, ROOM], written   from: rows of the shortest sequence that is served here
// grid: chunks of the longest sequence, heads, seqs
// shared: 2 * CHUNK * ld + 2 * CHUNK * SQUARE_LD + CHUNK floats; ld: d to a multiple of 4, and 4
extern "C" __global__ void __launch_bounds__(128)
    delta_prepare(const float *q, int q_ld, int q_offset, int q_stride, const float *k, int k_ld,
                  int k_offset, int k_stride, int key_heads, const float *gates, float *room,
                  const int *step, int from, int d) {
    QRT_DYN_SMEM(float, shared);
    const int s = blockIdx.z, head = blockIdx.y, heads = gridDim.y;
    if (s >= step[N_SEQS]) return;
    const int *offsets = section(step, AT_OFFSETS);
    const int first = offsets[s], last = offsets[s + 1], t = first + blockIdx.x * CHUNK;
    if (last - first < from || t >= last) return;
    const int n = last - t < CHUNK ? last - t : CHUNK, ld = (d + 3) / 4 * 4 + 4;
    float *keys = shared, *queries = keys + CHUNK * ld;
    float *system = queries + CHUNK * ld;       // [column][row]
    float *decays = system + CHUNK * SQUARE_LD; // [row][column], then Y
    float *betas = decays + CHUNK * SQUARE_LD;  // [row]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    load_rows(rows_of(k, k_ld, k_offset, k_stride, head % key_heads, d), t, n, keys, ld);
    load_rows(rows_of(q, q_ld, q_offset, q_stride, head % key_heads, d), t, n, queries, ld);
    if (warp == 0) {
        const float *own = gates + (i64)(t + lane) * 2 * heads + head;
        float g = lane < n ? own[0] : 0, sum = 0;
        betas[lane] = lane < n ? own[heads] : 0;
#pragma unroll
        for (int i = 0; i < CHUNK; i++) { // of a lane column `lane`
            float next = __shfl_sync(ALL_LANES, g, i);
            if (i > lane) sum += next;
            decays[i * SQUARE_LD + lane] = i < lane ? 0 : expf(sum);
        }
    }
    __syncthreads();

    // Rows low, low + 16 of k and q by columns right, right + 8, ..
    const int low = lane % 8 + 8 * (warp % 2), right = lane / 8 + 4 * (warp / 2);
    float kk[2][4], qk[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) kk[i / 4][i % 4] = qk[i / 4][i % 4] = 0;
    for (int c = 0; c < d; c += 4) {
        Four a[2], b[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            a[i] = four_at(keys + (low + 16 * i) * ld + c);
            b[i] = four_at(queries + (low + 16 * i) * ld + c);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            Four x = four_at(keys + (right + 8 * j) * ld + c);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                kk[i][j] = dot(a[i], x, kk[i][j]);
                qk[i][j] = dot(b[i], x, qk[i][j]);
            }
        }
    }
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const int i = low + 16 * (e / 4), j = right + 8 * (e % 4);
        float decay = decays[i * SQUARE_LD + j];
        system[j * SQUARE_LD + i] = betas[i] * decay * kk[e / 4][e % 4]; // read where j < i
        decays[i * SQUARE_LD + j] = j <= i ? decay * qk[e / 4][e % 4] : 0;
    }
    __syncthreads();

    float *to = room + ((i64)t * heads + head) * ROOM + lane;
    const i64 next_row = (i64)heads * ROOM;
    if (warp > 0) {
        for (int i = warp - 1; i < n; i += 3)
            to[i * next_row + CHUNK] = decays[i * SQUARE_LD + lane];
        return;
    }
    float x[CHUNK]; // column `lane` of the inverse
#pragma unroll
    for (int i = 0; i < CHUNK; i++) x[i] = i == lane ? 1 : 0;
#pragma unroll
    for (int m = 0; m < CHUNK - 1; m++)
#pragma unroll
        for (int i = m / 4 * 4; i < CHUNK; i += 4) {
            Four a = four_at(system + m * SQUARE_LD + i);
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (i + e > m) x[i + e] = fmaf(-a.x[e], x[m], x[i + e]);
        }
#pragma unroll
    for (int i = 0; i < CHUNK; i++)
        if (i < n) to[i * next_row] = x[i] * betas[lane];
}

// Sums over j <= row of a_j u_j, for two values; a: a row of X or Y   u: [CHUNK][VALUES / 2]
INLINE Two triangle(const float *a, const Two *u, int row, Two sum) {
#pragma unroll
    for (int j = 0; j < CHUNK; j += 4) {
        Four x = four_at(a + j);
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (j + e <= row) {
                Two y = u[(j + e) * (VALUES / 2)];
                sum.x[0] = fmaf(x.x[e], y.x[0], sum.x[0]);
                sum.x[1] = fmaf(x.x[e], y.x[1], sum.x[1]);
            }
    }
    return sum;
}

// Four rows and columns of the state behind `rows` rows of a chunk. s: the state before it
// u: [CHUNK][VALUES], from the first of the four rows on   whole: the decay of s
INLINE void state_behind(const float *s, const float *keys, const float *u, const float *decays,
                         float whole, int rows, int ld, Four (&to)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[i] = four_at(s + i * ld);
#pragma unroll
        for (int e = 0; e < 4; e++) to[i].x[e] *= whole;
    }
#pragma unroll 4
    for (int j = 0; j < rows; j++) {
        Four key = four_at(keys + j * ld), y = four_at(u + j * VALUES);
        float decay = decays[j];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float f = y.x[i] * decay;
#pragma unroll
            for (int e = 0; e < 4; e++) to[i].x[e] = fmaf(f, key.x[e], to[i].x[e]);
        }
    }
}

// v: [T, heads, d] view   state: [slot][layers][heads][d values][d keys]   out: [T, heads * d]
// grid: d / VALUES, heads, seqs
// shared: (2 * CHUNK + VALUES) * ld + 2 * CHUNK * (SQUARE_LD + VALUES) + 3 * CHUNK floats
extern "C" __global__ void __launch_bounds__(128)
    delta_walk(const float *q, int q_ld, int q_offset, int q_stride, const float *k, int k_ld,
               int k_offset, int k_stride, int key_heads, const float *v, int v_ld, int v_offset,
               int v_stride, const float *gates, const float *room, float *state, float *out,
               const int *step, int from, int layers, int layer, int d) {
    QRT_DYN_SMEM(float, shared);
    const int seq = blockIdx.z, head = blockIdx.y, heads = gridDim.y;
    if (seq >= step[N_SEQS]) return;
    const int *offsets = section(step, AT_OFFSETS);
    const int first = offsets[seq], last = offsets[seq + 1];
    if (last - first < from) return;
    const int ld = (d + 3) / 4 * 4 + 4, value = blockIdx.x * VALUES;
    float *keys = shared, *queries = keys + CHUNK * ld, *s = queries + CHUNK * ld;
    float *x = s + VALUES * ld, *y = x + CHUNK * SQUARE_LD;
    float *error = y + CHUNK * SQUARE_LD, *u = error + CHUNK * VALUES; // [CHUNK][VALUES]
    float *before = u + CHUNK * VALUES, *behind = before + CHUNK, *saved = behind + CHUNK;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Rows key_rows = rows_of(k, k_ld, k_offset, k_stride, head % key_heads, d);
    const Rows query_rows = rows_of(q, q_ld, q_offset, q_stride, head % key_heads, d);

    const i64 at = (((i64)layer * heads + head) * d + value) * d;
    const float *source = state + STATE_SLOT(section(step, AT_SOURCES)[seq]) + at;
    const bool fresh = section(step, AT_STARTS)[seq] == 0;
    for (int i = warp; i < VALUES; i += 4)
        for (int c = lane; c < ld; c += 32)
            s[i * ld + c] = !fresh && value + i < d && c < d ? source[(i64)i * d + c] : 0;
    int save = 0;
    const int *save_rows = section(step, AT_SAVES), saves = step[N_SAVES];
    while (save < saves && save_rows[save] < first) save++;

    // A thread has rows low, low + 16 of a chunk by two values; and 4 x 4 of the state.
    const int low = lane % 8 + 8 * (warp % 2), pair = lane / 8 + 4 * (warp / 2);
    const int four = 4 * (lane / 8), column = 4 * (lane % 8 + 8 * warp);
    for (int t = first; t < last; t += CHUNK) {
        const int n = last - t < CHUNK ? last - t : CHUNK;
        __syncthreads(); // what the chunk before left is no longer read
        load_rows(key_rows, t, n, keys, ld);
        load_rows(query_rows, t, n, queries, ld);
        for (int i = warp; i < n; i += 4) {
            const float *own = room + ((i64)(t + i) * heads + head) * ROOM + lane;
            x[i * SQUARE_LD + lane] = own[0];
            y[i * SQUARE_LD + lane] = own[CHUNK];
        }
        float g = 0; // of row `lane`
        if (warp == 0) {
            g = lane < n ? gates[(i64)(t + lane) * 2 * heads + head] : 0;
            before[lane] = decay_up_to(g);
            behind[lane] = decay_behind(g, n - 1);
        }
        __syncthreads();

        Two sk[2] = {{{0, 0}}, {{0, 0}}}, sq[2] = {{{0, 0}}, {{0, 0}}};
        for (int c = 0; c < d; c += 4) {
            Four row[2];
#pragma unroll
            for (int e = 0; e < 2; e++) row[e] = four_at(s + (2 * pair + e) * ld + c);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                Four a = four_at(keys + (low + 16 * i) * ld + c);
                Four b = four_at(queries + (low + 16 * i) * ld + c);
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    sk[i].x[e] = dot(a, row[e], sk[i].x[e]);
                    sq[i].x[e] = dot(b, row[e], sq[i].x[e]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = low + 16 * i, at_value = value + 2 * pair;
            const float *own = v + (i64)(t + r) * v_ld + v_offset + head * v_stride + at_value;
            Two e;
#pragma unroll
            for (int j = 0; j < 2; j++)
                e.x[j] = fmaf(-before[r], sk[i].x[j], r < n && at_value + j < d ? own[j] : 0);
            ((Two *)error)[r * (VALUES / 2) + pair] = e;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = low + 16 * i;
            if (r < n)
                ((Two *)u)[r * (VALUES / 2) + pair] =
                    triangle(x + r * SQUARE_LD, (const Two *)error + pair, r, {{0, 0}});
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = low + 16 * i, at_value = value + 2 * pair;
            if (r >= n) continue;
            Two o = {{sq[i].x[0] * before[r], sq[i].x[1] * before[r]}};
            o = triangle(y + r * SQUARE_LD, (const Two *)u + pair, r, o);
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (at_value + j < d)
                    out[((i64)(t + r) * heads + head) * d + at_value + j] = o.x[j];
        }

        Four made[4];
        for (; save < saves && save_rows[save] < t + n; save++) {
            const int row = save_rows[save] - t;
            __syncthreads(); // the state saved before is done
            if (warp == 0) saved[lane] = decay_behind(g, row);
            __syncthreads();
            float *to = state + STATE_SLOT(section(step, AT_SAVED)[save]) + at;
            for (int c = column; c < d; c += 128) {
                state_behind(s + four * ld + c, keys + c, u + four, saved, before[row], row + 1, ld,
                             made);
                for (int i = 0; i < 4; i++)
                    for (int e = 0; e < 4; e++)
                        if (value + four + i < d && c + e < d)
                            to[(i64)(four + i) * d + c + e] = made[i].x[e];
            }
        }
        for (int c = column; c < d; c += 128) {
            state_behind(s + four * ld + c, keys + c, u + four, behind, before[n - 1], n, ld, made);
#pragma unroll
            for (int i = 0; i < 4; i++) *(Four *)(s + (four + i) * ld + c) = made[i];
        }
    }
    __syncthreads();
    float *to = state + STATE_SLOT(section(step, AT_SLOTS)[seq]) + at;
    for (int i = warp; i < VALUES && value + i < d; i += 4)
        for (int c = lane; c < d; c += 32) to[(i64)i * d + c] = s[i * ld + c];
}

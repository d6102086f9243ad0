// Ops that move, rotate or choose rows: embed, gather_rows, rope, conv1d_silu, moe_route,
// kv_append.
#include "kernels.h"
#include "scratch.h"
#include <float.h>

// out[t] = row tokens[t] of the table
static void embed(const qrt_op *op, const qrt_ctx *c) {
    const qrt_tensor *w = &op->parts[0].w;
    int64_t lo, hi;
    qrt_share(c, c->batch->n_rows, &lo, &hi);
    for (int64_t t = lo; t < hi; t++) {
        const uint8_t *row = w->data + c->batch->tokens[t] * w->row_bytes;
        c->kernels->dequantize[w->format](row, op->out.ptr + t * op->out.ld, w->cols);
    }
}

// x: [T, width]   out: [n_out, width]
static void gather_rows(const qrt_op *op, const qrt_ctx *c) {
    const qrt_view *x = &op->in[0];
    int64_t lo, hi;
    qrt_share(c, c->batch->n_out, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        memcpy(op->out.ptr + i * op->out.ld, x->ptr + c->batch->out_rows[i] * x->ld,
               (size_t)x->heads * (size_t)x->dim * sizeof(float));
    }
}

// Cosines and sines of position * frequency, computed in double and exact to float32 for angles
// below 2^20.
static void rotations(const double *freq, const int32_t *position, int64_t axis_ld,
                      const int32_t *sections, int half, float *cosines, float *sines) {
    // pi / 2 in two parts; n has at most 20 bits and the first part 33, so that their product is
    // exact.
    const double shift = 0x1.8p52, inv = 0x1.45f306dc9c883p-1;
    const double pi1 = 0x1.921fb544p+0, pi2 = 0x1.0b4611a626331p-34;
    double p[3];
    for (int i = 0; i < 3; i++) p[i] = position[i * axis_ld];
    for (int j = 0; j < half; j++) {
        int axis = j % 3;
        if (axis && j >= 3 * sections[axis - 1]) axis = 0;
        double a = p[axis] * freq[j], n = (a * inv + shift) - shift;
        double r = (a - n * pi1) - n * pi2, s = r * r;
        double sin_r =
            r + r * s * (-1.0 / 6 + s * (1.0 / 120 + s * (-1.0 / 5040 + s * (1.0 / 362880))));
        double cos_r =
            1 -
            s * (0.5 - s * (1.0 / 24 - s * (1.0 / 720 - s * (1.0 / 40320 - s * (1.0 / 3628800)))));
        int quarter = (int)n & 3;
        double co = quarter & 1 ? sin_r : cos_r, si = quarter & 1 ? cos_r : sin_r;
        cosines[j] = (float)(quarter == 1 || quarter == 2 ? -co : co);
        sines[j] = (float)(quarter & 2 ? -si : si);
    }
}

// x: [T, heads, dim]   out: [T, heads * dim]; pairs (j, j + rot / 2) of each head are rotated
static void rope(const qrt_op *op, const qrt_ctx *c) {
    const qrt_view *x = &op->in[0];
    int rot = op->n[0], half = rot / 2, dim = x->dim;
    double *freq = (double *)(void *)c->scratch;
    float *cosines = (float *)(freq + qrt_padded(half)), *sines = cosines + qrt_padded(half);
    double ratio = pow((double)op->f[0], -2.0 / rot);
    for (int j = 0; j < half; j++) freq[j] = j ? freq[j - 1] * ratio : 1.0;
    int64_t n = c->batch->n_rows, lo, hi;
    qrt_share(c, n, &lo, &hi);
    for (int64_t t = lo; t < hi; t++) {
        rotations(freq, c->batch->positions + t, n, op->n + 1, half, cosines, sines);
        for (int h = 0; h < x->heads; h++) {
            const float *from = x->ptr + t * x->ld + (int64_t)h * x->stride;
            float *to = op->out.ptr + t * op->out.ld + (int64_t)h * dim;
            int j = 0;
            for (; j + QF <= half; j += QF) {
                qf a = qf_load(from + j), b = qf_load(from + half + j);
                qf co = qf_load(cosines + j), si = qf_load(sines + j);
                qf_store(to + j, qf_fnma(b, si, qf_mul(a, co)));
                qf_store(to + half + j, qf_fma(a, si, qf_mul(b, co)));
            }
            if (j < half) {
                int m = half - j;
                qf a = qf_load_part(from + j, m), b = qf_load_part(from + half + j, m);
                qf co = qf_load_part(cosines + j, m), si = qf_load_part(sines + j, m);
                qf_store_part(to + j, qf_fnma(b, si, qf_mul(a, co)), m);
                qf_store_part(to + half + j, qf_fma(a, si, qf_mul(b, co)), m);
            }
            memcpy(to + rot, from + rot, (size_t)(dim - rot) * sizeof(float));
        }
    }
}

// A block of n channels in scratch, one row of QRT_CONV_BLOCK for each tap: [channels][taps] ->
// [taps][channels]
INLINE void taps_in(const float *p, int taps, int64_t n, float *rows) {
    int64_t i = 0;
    qf v[4];
    for (; taps == 4 && i + QF <= n; i += QF) {
        qf_load4(p + i * 4, v);
        for (int k = 0; k < 4; k++) qf_store(rows + k * QRT_CONV_BLOCK + i, v[k]);
    }
    for (; taps == 3 && i + QF <= n; i += QF) {
        qf_load3(p + i * 3, v);
        for (int k = 0; k < 3; k++) qf_store(rows + k * QRT_CONV_BLOCK + i, v[k]);
    }
    for (; i < n; i++) {
        for (int k = 0; k < taps; k++) rows[k * QRT_CONV_BLOCK + i] = p[i * taps + k];
    }
}

// The way back, from rows that lie anywhere.
INLINE void taps_out(float *p, int taps, int64_t n, const float *const *rows) {
    int64_t i = 0;
    for (; taps == 3 && i + QF <= n; i += QF) {
        qf v[3] = {qf_load(rows[0] + i), qf_load(rows[1] + i), qf_load(rows[2] + i)};
        qf_store3(p + i * 3, v);
    }
    for (; i < n; i++) {
        for (int k = 0; k < taps; k++) p[i * taps + k] = rows[k][i];
    }
}

INLINE qf convolve(const float *const *rows, const float *w, int taps, int64_t i, int n) {
    qf acc = qf_zero();
    for (int k = 0; k < taps; k++) {
        const float *x = rows[k] + i, *y = w + k * QRT_CONV_BLOCK + i;
        acc = n == QF ? qf_fma(qf_load(x), qf_load(y), acc)
                      : qf_fma(qf_load_part(x, n), qf_load_part(y, n), acc);
    }
    return qf_silu(acc);
}

#define MAX_TAPS 16

// rows[k] = input k - (taps - 1) rows away from row t of a sequence, which may lie before the step
INLINE void window(const float **rows, int taps, const float *x, int64_t ld, const float *before,
                   int64_t t) {
    for (int k = 0; k < taps; k++) {
        int64_t at = t + k - (taps - 1);
        rows[k] = at >= 0 ? x + at * ld : before + (at + taps - 1) * QRT_CONV_BLOCK;
    }
}

// A slot's state of this layer from channel `at`.
INLINE float *conv_state(const qrt_op *op, const qrt_state *st, int32_t slot, int64_t at) {
    int64_t layer = (int64_t)slot * st->delta_layers + op->layer;
    return st->conv + (layer * st->channels + at) * (st->conv_kernel - 1);
}

// x, out: [T, channels]   w: [channels, taps]   state: [slot][layer][channels][taps - 1], updated
static void conv1d_silu(const qrt_op *op, const qrt_ctx *c) {
    const qrt_state *st = c->state;
    const qrt_batch *b = c->batch;
    const int taps = st->conv_kernel;
    // Rows are far apart in memory: long pieces of each, but one for every thread.
    const int64_t channels = st->channels, lines = (channels + 63) / 64,
                  share = (lines + c->threads - 1) / c->threads * 64,
                  width = share < QRT_CONV_BLOCK ? share : QRT_CONV_BLOCK,
                  blocks = (channels + width - 1) / width;
    float *w = (float *)(void *)c->scratch, *before = w + taps * QRT_CONV_BLOCK;
    int64_t lo, hi;
    qrt_share(c, blocks, &lo, &hi);
    for (int64_t block = lo; block < hi; block++) {
        int64_t at = block * width;
        int64_t n = channels - at < width ? channels - at : width;
        taps_in(op->vec[0] + at * taps, taps, n, w);
        for (int s = 0; s < b->n_seqs; s++) {
            int64_t first = b->row_offsets[s], rows = b->row_offsets[s + 1] - first;
            if (b->starts[s] == 0) {
                memset(before, 0, (size_t)(taps - 1) * QRT_CONV_BLOCK * sizeof(float));
            } else {
                taps_in(conv_state(op, st, b->sources[s], at), taps - 1, n, before);
            }
            const float *x = op->in[0].ptr + first * op->in[0].ld + at, *from[MAX_TAPS];
            float *out = op->out.ptr + first * op->out.ld + at;
            for (int64_t t = 0; t < rows; t++, out += op->out.ld) {
                window(from, taps, x, op->in[0].ld, before, t);
                int64_t i = 0;
                if (taps == 4) { // the family's size, unrolled
                    for (; i + QF <= n; i += QF) qf_store(out + i, convolve(from, w, 4, i, QF));
                }
                for (; i + QF <= n; i += QF) qf_store(out + i, convolve(from, w, taps, i, QF));
                if (i < n)
                    qf_store_part(out + i, convolve(from, w, taps, i, (int)(n - i)), (int)(n - i));
            }
            // The first entries of the window one row later are the newest inputs.
            window(from, taps, x, op->in[0].ld, before, rows);
            taps_out(conv_state(op, st, b->slots[s], at), taps - 1, n, from);
            for (int i = qrt_first_save(b, first); i < b->n_saves; i++) {
                if (b->save_rows[i] >= first + rows) break;
                window(from, taps, x, op->in[0].ld, before, b->save_rows[i] - first + 1);
                taps_out(conv_state(op, st, b->save_slots[i], at), taps - 1, n, from);
            }
        }
    }
}

// scores: [T, experts]   out: [T, 2 * used], expert numbers from the largest score down, then
// weights
static void moe_route(const qrt_op *op, const qrt_ctx *c) {
    const qrt_view *x = &op->in[0];
    int used = op->n[0], experts = x->heads * x->dim;
    int64_t lo, hi;
    qrt_share(c, qrt_rows(op, c), &lo, &hi);
    for (int64_t r = lo; r < hi; r++) {
        const float *score = x->ptr + r * x->ld;
        float *best = op->out.ptr + r * op->out.ld, *weight = best + used;
        // best: the experts chosen so far, weight: their scores; kept sorted, the earlier expert
        // first among equals
        for (int e = 0, n = 0; e < experts; e++) {
            int at = n;
            while (at > 0 && score[e] > weight[at - 1]) at--;
            if (at == used) continue;
            if (n < used) n++;
            for (int i = n - 1; i > at; i--) best[i] = best[i - 1], weight[i] = weight[i - 1];
            best[at] = (float)e, weight[at] = score[e];
        }
        float top = weight[0], sum = 0;
        for (int i = 0; i < used; i++) sum += weight[i] = expf(weight[i] - top);
        for (int i = 0; i < used; i++) weight[i] /= sum;
    }
}

// Out of range means the largest number: an infinity would poison rows that must not see it.
INLINE qf to_range(qf a, float most) { return qf_min(qf_set1(most), qf_max(qf_set1(-most), a)); }

#define HALF_MAX 65504.0f
INLINE void store_f16(uint16_t *to, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + QF <= n; i += QF) qf_to_f16(to + i, to_range(qf_load(x + i), HALF_MAX));
    if (i < n) {
        uint16_t buf[QF];
        qf_to_f16(buf, to_range(qf_load_part(x + i, (int)(n - i)), HALF_MAX));
        memcpy(to + i, buf, (size_t)(n - i) * sizeof *buf);
    }
}

INLINE void store_f32(float *to, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + QF <= n; i += QF) qf_store(to + i, to_range(qf_load(x + i), FLT_MAX));
    if (i < n) {
        const int left = (int)(n - i);
        qf_store_part(to + i, to_range(qf_load_part(x + i, left), FLT_MAX), left);
    }
}

// x: [head_dim] of row r, head h -> element `at` of a pool
INLINE void store(const qrt_state *st, void *pool, int64_t at, const qrt_view *x, int64_t r,
                  int h) {
    const float *from = x->ptr + r * x->ld + (int64_t)h * x->stride;
    if (st->kv_bytes == 4) {
        store_f32((float *)pool + at, from, st->head_dim);
    } else {
        store_f16((uint16_t *)pool + at, from, st->head_dim);
    }
}

// k, v: [T, kv_heads, dim] -> pages
static void kv_append(const qrt_op *op, const qrt_ctx *c) {
    const qrt_state *st = c->state;
    const qrt_batch *b = c->batch;
    const qrt_view *k = &op->in[0], *v = &op->in[1];
    int64_t lo, hi;
    qrt_share(c, b->n_rows, &lo, &hi);
    for (int s = 0; s < b->n_seqs; s++) {
        int64_t first = b->row_offsets[s], end = b->row_offsets[s + 1];
        for (int64_t r = first > lo ? first : lo; r < end && r < hi; r++) {
            int64_t p = b->starts[s] + r - first;
            int64_t page = b->pages[(int64_t)s * b->page_width + p / st->page_tokens];
            for (int h = 0; h < st->kv_heads; h++) {
                int64_t at = ((int64_t)op->layer * st->n_pages + page) * st->kv_heads + h;
                at = (at * st->page_tokens + p % st->page_tokens) * st->head_dim;
                store(st, st->k, at, k, r, h);
                store(st, st->v, at, v, r, h);
            }
        }
    }
}

void QRT_FILL(rows)(qrt_kernels *k);
void QRT_FILL(rows)(qrt_kernels *k) {
    k->op[QRT_EMBED] = embed;
    k->op[QRT_GATHER_ROWS] = gather_rows;
    k->op[QRT_ROPE] = rope;
    k->op[QRT_CONV1D_SILU] = conv1d_silu;
    k->op[QRT_MOE_ROUTE] = moe_route;
    k->op[QRT_KV_APPEND] = kv_append;
}

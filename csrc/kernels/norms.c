// Norms, gates and elementwise ops. A row's result depends on that row alone.
#include "quantize.h"

// Columns of an elementwise op that are worked on at once: one block of a quantised row.
#define BLOCK 32

// Head h of row r in a view; as an output it may have been declared as one wide head.
INLINE const float *head_at(const qrt_view *v, int64_t r, int64_t h) {
    return v->ptr + r * v->ld + h * v->stride;
}
INLINE float *out_at(const qrt_view *v, int64_t r, int64_t h, int64_t dim) {
    return v->ptr + r * v->ld + h * (v->heads == 1 ? dim : v->stride);
}

INLINE float sum_of_squares(const float *x, int64_t n) {
    qf a = qf_zero(), b = qf_zero(), c = qf_zero(), d = qf_zero();
    int64_t i = 0;
    for (; i + 4 * QF <= n; i += 4 * QF) {
        qf v = qf_load(x + i), w = qf_load(x + i + QF);
        a = qf_fma(v, v, a), b = qf_fma(w, w, b);
        v = qf_load(x + i + 2 * QF), w = qf_load(x + i + 3 * QF);
        c = qf_fma(v, v, c), d = qf_fma(w, w, d);
    }
    for (; i + QF <= n; i += QF) {
        qf v = qf_load(x + i);
        a = qf_fma(v, v, a);
    }
    if (i < n) {
        qf v = qf_load_part(x + i, (int)(n - i));
        b = qf_fma(v, v, b);
    }
    return qf_hsum(qf_add(qf_add(a, b), qf_add(c, d)));
}

// y = x * s * w * silu(z); w and z may be NULL.
INLINE void scale_row(float *y, const float *x, float s, const float *w, const float *z,
                      int64_t n) {
    qf scale = qf_set1(s);
    int64_t i = 0;
    for (; i + QF <= n; i += QF) {
        qf v = qf_mul(qf_load(x + i), scale);
        if (w) v = qf_mul(v, qf_load(w + i));
        if (z) v = qf_mul(v, qf_silu(qf_load(z + i)));
        qf_store(y + i, v);
    }
    if (i < n) {
        int m = (int)(n - i);
        qf v = qf_mul(qf_load_part(x + i, m), scale);
        if (w) v = qf_mul(v, qf_load_part(w + i, m));
        if (z) v = qf_mul(v, qf_silu(qf_load_part(z + i, m)));
        qf_store_part(y + i, v, m);
    }
}

enum norm { RMS, GATED_RMS, L2 };

// x (, z): [rows, heads, dim]   w: [dim]   out: [rows, heads * dim], also quantised
INLINE void norm(const qrt_op *op, const qrt_ctx *c, enum norm kind) {
    const qrt_view *x = &op->in[0], *z = &op->in[1], *out = &op->out;
    int64_t heads = x->heads, dim = x->dim, lo, hi;
    // Work is handed out head by head, unless a block of the quantised row spans two heads.
    bool quant = op->quant.q != NULL;
    int64_t step = quant && dim % 32 ? heads : 1;
    qrt_share(c, qrt_rows(op, c) * (heads / step), &lo, &hi);
    int64_t r = lo / (heads / step), h = lo % (heads / step) * step;
    for (; lo < hi; lo++) {
        for (int64_t g = h; g < h + step; g++) {
            const float *from = head_at(x, r, g);
            float s = sum_of_squares(from, dim);
            s = kind == L2 ? op->f[0] / sqrtf(s + 1e-6f) : 1.0f / sqrtf(s / (float)dim + op->f[0]);
            scale_row(out_at(out, r, g, dim), from, s, kind == L2 ? NULL : op->vec[0],
                      kind == GATED_RMS ? head_at(z, r, g) : NULL, dim);
        }
        if (quant) {
            const float *row = out_at(out, r, h, dim);
            for (int64_t b = 0; b < step * dim / 32; b++) {
                quantize_block32(row + b * 32, &op->quant, r, h * dim / 32 + b);
            }
        }
        if ((h += step) == heads) h = 0, r++;
    }
}

static void rms_norm(const qrt_op *op, const qrt_ctx *c) { norm(op, c, RMS); }
static void gated_rms_norm(const qrt_op *op, const qrt_ctx *c) { norm(op, c, GATED_RMS); }
static void l2_norm(const qrt_op *op, const qrt_ctx *c) { norm(op, c, L2); }

// n <= BLOCK columns of row r from column `at` of a view: in place where they are adjacent, else
// copied to buf.
INLINE const float *columns(const qrt_view *v, int64_t r, int64_t at, int64_t n, float *buf) {
    const float *row = v->ptr + r * v->ld;
    if (v->heads == 1 || v->stride == v->dim) return row + at;
    int64_t h = at / v->dim, d = at % v->dim;
    if (d + n <= v->dim) return row + h * v->stride + d;
    for (int64_t i = 0; i < n; i++) {
        buf[i] = row[h * v->stride + d];
        if (++d == v->dim) d = 0, h++;
    }
    return buf;
}

enum pair { SILU_MUL, SIGMOID_MUL, ADD };

INLINE qf combine(qf a, qf b, enum pair kind) {
    if (kind == SILU_MUL) return qf_mul(qf_silu(a), b);
    return kind == SIGMOID_MUL ? qf_mul(a, qf_sigmoid(b)) : qf_add(a, b);
}

// a, b: [rows, cols], b also [rows, 1]   out: [rows, cols], also quantised
INLINE void elementwise(const qrt_op *op, const qrt_ctx *c, enum pair kind) {
    const qrt_view *a = &op->in[0], *b = &op->in[1];
    int64_t cols = (int64_t)a->heads * a->dim, blocks = (cols + BLOCK - 1) / BLOCK, lo, hi;
    bool broadcast = cols > 1 && (int64_t)b->heads * b->dim == 1;
    qrt_share(c, qrt_rows(op, c) * blocks, &lo, &hi);
    int64_t r = lo / blocks, k = lo % blocks;
    float abuf[BLOCK], bbuf[BLOCK];
    for (; lo < hi; lo++) {
        int64_t at = k * BLOCK, n = cols - at < BLOCK ? cols - at : BLOCK, i = 0;
        const float *x = columns(a, r, at, n, abuf), *y = bbuf;
        float *out = op->out.ptr + r * op->out.ld + at;
        if (broadcast) {
            for (int j = 0; j < BLOCK; j++) bbuf[j] = b->ptr[r * b->ld];
        } else {
            y = columns(b, r, at, n, bbuf);
        }
        for (; i + QF <= n; i += QF) {
            qf_store(out + i, combine(qf_load(x + i), qf_load(y + i), kind));
        }
        if (i < n) {
            int m = (int)(n - i);
            qf_store_part(out + i, combine(qf_load_part(x + i, m), qf_load_part(y + i, m), kind),
                          m);
        }
        if (op->quant.q && n == BLOCK) quantize_block32(out, &op->quant, r, k);
        if (++k == blocks) k = 0, r++;
    }
}

static void silu_mul(const qrt_op *op, const qrt_ctx *c) { elementwise(op, c, SILU_MUL); }
static void sigmoid_mul(const qrt_op *op, const qrt_ctx *c) { elementwise(op, c, SIGMOID_MUL); }
static void add(const qrt_op *op, const qrt_ctx *c) { elementwise(op, c, ADD); }

// a, b: [rows, heads]   dt_bias, a_log: [heads]   out: [rows, 2 * heads], log decays then betas
static void delta_gates(const qrt_op *op, const qrt_ctx *c) {
    const qrt_view *a = &op->in[0], *b = &op->in[1];
    int64_t heads = (int64_t)a->heads * a->dim, lo, hi;
    qrt_share(c, qrt_rows(op, c), &lo, &hi);
    for (int64_t r = lo; r < hi; r++) {
        const float *x = a->ptr + r * a->ld, *y = b->ptr + r * b->ld;
        float *g = op->out.ptr + r * op->out.ld, *beta = g + heads;
        for (int64_t h = 0; h < heads; h++) {
            float v = x[h] + op->vec[0][h]; // softplus: log(1 + e^v), without overflow
            g[h] = (v > 0 ? v + log1pf(expf(-v)) : log1pf(expf(v))) * op->vec[1][h];
        }
        int64_t h = 0;
        for (; h + QF <= heads; h += QF) qf_store(beta + h, qf_sigmoid(qf_load(y + h)));
        if (h < heads) {
            int m = (int)(heads - h);
            qf_store_part(beta + h, qf_sigmoid(qf_load_part(y + h, m)), m);
        }
    }
}

void QRT_FILL(norms)(qrt_kernels *k);
void QRT_FILL(norms)(qrt_kernels *k) {
    k->op[QRT_RMS_NORM] = rms_norm;
    k->op[QRT_GATED_RMS_NORM] = gated_rms_norm;
    k->op[QRT_L2_NORM] = l2_norm;
    k->op[QRT_SILU_MUL] = silu_mul;
    k->op[QRT_SIGMOID_MUL] = sigmoid_mul;
    k->op[QRT_ADD] = add;
    k->op[QRT_DELTA_GATES] = delta_gates;
}

// The gated delta rule. The state is walked once per token: with S the state before a token (rows:
// values, columns: keys), e = e^g, sk = S k, sq = S q,
//     u = beta (v - e sk)    out = e sq + (k . q) u    S <- e S + u k
// so the pass that writes S also reads it for the next token. One order of sums for every length of
// a step: a row's result does not depend on how a prompt is cut.
#include "kernels.h"
#include "scratch.h"

#define GROUP 4 // state rows of one pass
#define AHEAD 2 // so many tokens before it is its turn, a token's rows are fetched

// What a pass needs of a token.
typedef struct {
    const float *k, *q, *v;
    float decay, beta, kq;
    float *out;
} token;

// sk, sq: [GROUP] products of the state's rows with k and q
INLINE void read_group(const float *s, int64_t ld, int64_t d, const token *t, float *sk,
                       float *sq) {
    qf a[GROUP], b[GROUP];
    for (int r = 0; r < GROUP; r++) a[r] = b[r] = qf_zero();
    for (int64_t i = 0; i < d; i += QF) {
        qf k = qf_load(t->k + i), q = qf_load(t->q + i);
        for (int r = 0; r < GROUP; r++) {
            qf x = qf_load(s + r * ld + i);
            a[r] = qf_fma(x, k, a[r]);
            b[r] = qf_fma(x, q, b[r]);
        }
    }
    qf_hsum4(sk, a[0], a[1], a[2], a[3]);
    qf_hsum4(sq, b[0], b[1], b[2], b[3]);
}

// The state after token t, which has corrections u, and its products with the next token (NULL:
// none).
INLINE void write_group(float *s, int64_t ld, int64_t d, const token *t, const float *u,
                        const token *next, float *sk, float *sq) {
    qf a[GROUP], b[GROUP], v[GROUP], decay = qf_set1(t->decay);
    for (int r = 0; r < GROUP; r++) a[r] = b[r] = qf_zero(), v[r] = qf_set1(u[r]);
    for (int64_t i = 0; i < d; i += QF) {
        qf k = qf_load(t->k + i);
        qf nk = next ? qf_load(next->k + i) : k, nq = next ? qf_load(next->q + i) : k;
        for (int r = 0; r < GROUP; r++) {
            qf x = qf_fma(v[r], k, qf_mul(qf_load(s + r * ld + i), decay));
            qf_store(s + r * ld + i, x);
            if (next) {
                a[r] = qf_fma(x, nk, a[r]);
                b[r] = qf_fma(x, nq, b[r]);
            }
        }
    }
    if (!next) return;
    qf_hsum4(sk, a[0], a[1], a[2], a[3]);
    qf_hsum4(sq, b[0], b[1], b[2], b[3]);
}

// Where the walk of one (sequence, head, rows of the state) reads and writes.
typedef struct {
    const qrt_op *op;
    int64_t row, n; // rows of the step
    int64_t head, value, values;
    float *state; // [values][d], adjacent
    int64_t d;
    float *scratch;
} walk;

// Token t of a walk. pad: k and q are copied there, with zeros behind them up to ld.
INLINE token token_at(const walk *w, int64_t t, float *pad, int64_t ld) {
    const qrt_view *q = &w->op->in[0], *k = &w->op->in[1], *v = &w->op->in[2];
    int64_t r = w->row + t, key_head = w->head % k->heads;
    const float *gates = w->op->in[3].ptr + r * w->op->in[3].ld + w->head;
    token x = {.k = k->ptr + r * k->ld + key_head * k->stride,
               .q = q->ptr + r * q->ld + key_head * q->stride,
               .v = v->ptr + r * v->ld + w->head * v->stride + w->value,
               .beta = gates[v->heads],
               .out = w->op->out.ptr + r * w->op->out.ld + w->head * v->dim + w->value};
    if (pad) {
        memcpy(pad, x.k, (size_t)w->d * sizeof(float));
        memcpy(pad + ld, x.q, (size_t)w->d * sizeof(float));
        x.k = pad, x.q = pad + ld;
    }
    float e[QF];
    qf_store(e, qf_exp(qf_set1(gates[0])));
    x.decay = e[0];
    qf sum = qf_zero();
    for (int64_t i = 0; i < ld; i += QF) sum = qf_fma(qf_load(x.k + i), qf_load(x.q + i), sum);
    x.kq = qf_hsum(sum);
    return x;
}

// Rows of q, k and v are far apart, in places that the processor does not foresee: they are fetched
// while the token before is worked on.
INLINE void fetch_token(const walk *w, int64_t t) {
    enum { LINE = 16 }; // floats
    const qrt_view *q = &w->op->in[0], *k = &w->op->in[1], *v = &w->op->in[2];
    const int64_t r = w->row + t, key_head = w->head % k->heads;
    const float *kp = k->ptr + r * k->ld + key_head * k->stride,
                *qp = q->ptr + r * q->ld + key_head * q->stride;
    for (int64_t i = 0; i < w->d; i += LINE) {
        __builtin_prefetch(kp + i, 0, 3);
        __builtin_prefetch(qp + i, 0, 3);
    }
    const float *vp = v->ptr + r * v->ld + w->head * v->stride + w->value;
    for (int64_t i = 0; i < w->values; i += LINE) __builtin_prefetch(vp + i, 0, 3);
}

// u and the output of a group's n values, from the products with the state before the token
INLINE void correct(const token *t, int64_t at, int64_t n, const float *sk, const float *sq,
                    float *u) {
    for (int64_t r = 0; r < n; r++) {
        u[r] = t->beta * (t->v[at + r] - t->decay * sk[r]);
        t->out[at + r] = t->decay * sq[r] + u[r] * t->kq;
    }
}

// values, ld: rows of s and their distance, multiples of GROUP and QF; pads: NULL, or room for two
// k and q pairs
INLINE void walk_rows(const walk *w, float *s, int64_t ld, float *pads) {
    float sk[QRT_DELTA_ROWS], sq[QRT_DELTA_ROWS], u[GROUP] = {0};
    token now = token_at(w, 0, pads, ld), next;
    for (int64_t g = 0; g < w->values; g += GROUP)
        read_group(s + g * ld, ld, ld, &now, sk + g, sq + g);
    for (int64_t t = 0; t < w->n; t++) {
        bool more = t + 1 < w->n;
        if (t + AHEAD < w->n) fetch_token(w, t + AHEAD);
        if (more) next = token_at(w, t + 1, pads ? pads + ((t + 1) & 1) * 2 * ld : NULL, ld);
        for (int64_t g = 0; g < w->values; g += GROUP) {
            int64_t n = w->values - g < GROUP ? w->values - g : GROUP;
            correct(&now, g, pads ? n : GROUP, sk + g, sq + g, u);
            if (more) {
                write_group(s + g * ld, ld, ld, &now, u, &next, sk + g, sq + g);
            } else {
                write_group(s + g * ld, ld, ld, &now, u, NULL, NULL, NULL);
            }
        }
        if (more) now = next;
    }
}

// The same on a padded copy, for sizes that vectors or groups do not divide.
static void walk_padded(const walk *w) {
    int64_t ld = qrt_padded(w->d);
    float *s = w->scratch, *pads = s + QRT_DELTA_ROWS * ld;
    memset(s, 0, qrt_delta_scratch((int)w->d));
    for (int64_t r = 0; r < w->values; r++)
        memcpy(s + r * ld, w->state + r * w->d, (size_t)w->d * sizeof *s);
    walk_rows(w, s, ld, pads);
    for (int64_t r = 0; r < w->values; r++)
        memcpy(w->state + r * w->d, s + r * ld, (size_t)w->d * sizeof *s);
}

// Rows of a head's state in a slot, from row `value`.
INLINE float *state_at(const qrt_op *op, const qrt_state *st, int32_t slot, int64_t head,
                       int64_t value) {
    int64_t layer = (int64_t)slot * st->delta_layers + op->layer;
    return st->delta + ((layer * st->v_heads + head) * st->d + value) * st->d;
}

// All rows that sequence s has in the step, for QRT_DELTA_ROWS rows of a head's state from `value`.
static void walk_part(const qrt_op *op, const qrt_ctx *c, int64_t s, int64_t h, int64_t value) {
    const qrt_state *st = c->state;
    const qrt_batch *b = c->batch;
    const int64_t d = st->d;
    walk w = {.op = op,
              .head = h,
              .value = value,
              .values = d - value < QRT_DELTA_ROWS ? d - value : QRT_DELTA_ROWS,
              .state = state_at(op, st, b->slots[s], h, value),
              .d = d,
              .scratch = (float *)(void *)c->scratch};
    const size_t bytes = (size_t)(w.values * d) * sizeof(float);
    if (b->starts[s] == 0) {
        memset(w.state, 0, bytes);
    } else if (b->sources[s] != b->slots[s]) {
        memcpy(w.state, state_at(op, st, b->sources[s], h, value), bytes);
    }
    // One walk from save to save: cutting a walk changes no bit.
    const int64_t last = b->row_offsets[s + 1];
    int32_t save = qrt_first_save(b, b->row_offsets[s]);
    for (int64_t row = b->row_offsets[s]; row < last; row += w.n) {
        const bool saved = save < b->n_saves && b->save_rows[save] < last;
        w.row = row;
        w.n = (saved ? b->save_rows[save] + 1 : last) - row;
        if (d % QF || d % GROUP) {
            walk_padded(&w);
        } else {
            walk_rows(&w, w.state, d, NULL);
        }
        if (saved) memcpy(state_at(op, st, b->save_slots[save++], h, value), w.state, bytes);
    }
}

// q, k: [T, key heads, d]   v, out: [T, heads, d]   gates: [T, 2 * heads], log decays then betas
// state: [slot][layer][heads][d values][d keys] float32, updated in place
static void delta_net(const qrt_op *op, const qrt_ctx *c) {
    const qrt_batch *b = c->batch;
    const int64_t d = c->state->d, heads = c->state->v_heads;
    const int64_t parts = (d + QRT_DELTA_ROWS - 1) / QRT_DELTA_ROWS;
    const int64_t units = b->n_seqs * heads * parts;
    const bool even = b->n_rows == b->n_seqs; // one token each: equal shares
    // Parts of one head read the same k and q and write neighbouring lines of `out`, which threads
    // would take from each other row after row: one thread does them all where there is enough
    // else.
    const int64_t together = !even && b->n_seqs * heads >= 4 * c->threads ? parts : 1;
    int64_t unit, end = units;
    if (even) {
        qrt_share(c, units, &unit, &end);
    } else {
        unit = qrt_take(c) * together;
    }
    while (unit < end) {
        for (int64_t i = 0; i < together; i++, unit++)
            walk_part(op, c, unit / (heads * parts), unit / parts % heads,
                      unit % parts * QRT_DELTA_ROWS);
        if (!even) unit = qrt_take(c) * together;
    }
}

void QRT_FILL(delta_net)(qrt_kernels *k);
void QRT_FILL(delta_net)(qrt_kernels *k) { k->op[QRT_DELTA_NET] = delta_net; }

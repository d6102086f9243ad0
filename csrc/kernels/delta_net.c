// The gated delta rule. The state is walked once per token: with S the state before a token (rows:
// values, columns: keys), e = e^g, sk = S k, sq = S q,
//     u = beta (v - e sk)    out = e sq + (k . q) u    S <- e S + u k
// so the pass that writes S also reads it for the next token. One order of sums for every length of
// a step: a row's result does not depend on how a prompt is cut.
#include "kernels.h"
#include "scratch.h"

#define GROUP 4 // state rows of one pass
#define AHEAD 2 // so many tokens before it is its turn, a token's output is fetched

// What a pass needs of a token. Rows of a step are far apart, at distances that lie on the same
// lines of a cache: a head's numbers of some tokens are copied to where they are adjacent, with
// zeros behind them up to a multiple of QF.
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

// Tokens of one head, prepared: n <= QRT_DELTA_TOKENS rows of the step from `row`. copies: room for
// k, q and v of each.
INLINE void prepare(const qrt_op *op, int64_t row, int64_t n, int64_t head, float *copies,
                    token *tokens) {
    const qrt_view *q = &op->in[0], *k = &op->in[1], *v = &op->in[2];
    const int64_t d = v->dim, ld = qrt_padded(d), key_head = head % k->heads;
    const size_t bytes = (size_t)d * sizeof(float);
    for (int64_t t = 0; t < n; t++, copies += 3 * ld) {
        const int64_t r = row + t;
        const float *gates = op->in[3].ptr + r * op->in[3].ld + head;
        memcpy(copies, k->ptr + r * k->ld + key_head * k->stride, bytes);
        memcpy(copies + ld, q->ptr + r * q->ld + key_head * q->stride, bytes);
        memcpy(copies + 2 * ld, v->ptr + r * v->ld + head * v->stride, bytes);
        for (int64_t i = d; i < ld; i++) copies[i] = copies[ld + i] = copies[2 * ld + i] = 0;
        qf sum = qf_zero();
        for (int64_t i = 0; i < ld; i += QF)
            sum = qf_fma(qf_load(copies + i), qf_load(copies + ld + i), sum);
        float e[QF];
        qf_store(e, qf_exp(qf_set1(gates[0])));
        tokens[t] = (token){.k = copies,
                            .q = copies + ld,
                            .v = copies + 2 * ld,
                            .decay = e[0],
                            .beta = gates[v->heads],
                            .kq = qf_hsum(sum),
                            .out = op->out.ptr + r * op->out.ld + head * d};
    }
}

// u and the output of `values` values from `at`, from the products with the state before the token
INLINE void correct(const token *t, int64_t at, int64_t values, const float *sk, const float *sq,
                    float *u) {
    const qf decay = qf_set1(t->decay), beta = qf_set1(t->beta), kq = qf_set1(t->kq);
    for (int64_t i = 0; i < values; i += QF) {
        qf v = qf_sub(qf_load(t->v + at + i), qf_mul(decay, qf_load(sk + i)));
        v = qf_mul(beta, v);
        qf_store(u + i, v);
        v = qf_add(qf_mul(decay, qf_load(sq + i)), qf_mul(v, kq));
        if (values - i < QF) {
            qf_store_part(t->out + at + i, v, (int)(values - i));
        } else {
            qf_store(t->out + at + i, v);
        }
    }
}

// Lines of the output, far apart as well, are fetched before they are written.
INLINE void fetch_out(const token *t, int64_t at, int64_t values) {
    enum { LINE = 16 }; // floats
    for (int64_t i = 0; i < values; i += LINE) __builtin_prefetch(t->out + at + i, 1, 3);
}

// All tokens, for `values` rows of a head's state from `value`. ld: their distance in s, a multiple
// of QF; s has a multiple of GROUP of them.
INLINE void walk_rows(const token *tokens, int64_t n, int64_t value, int64_t values, float *s,
                      int64_t ld) {
    float sk[QRT_DELTA_ROWS] = {0}, sq[QRT_DELTA_ROWS] = {0}, u[QRT_DELTA_ROWS] = {0};
    for (int64_t g = 0; g < values; g += GROUP)
        read_group(s + g * ld, ld, ld, tokens, sk + g, sq + g);
    for (int64_t t = 0; t < n; t++) {
        const token *now = tokens + t, *next = t + 1 < n ? now + 1 : NULL;
        if (t + AHEAD < n) fetch_out(now + AHEAD, value, values);
        correct(now, value, values, sk, sq, u);
        for (int64_t g = 0; g < values; g += GROUP) {
            if (next) {
                write_group(s + g * ld, ld, ld, now, u + g, next, sk + g, sq + g);
            } else {
                write_group(s + g * ld, ld, ld, now, u + g, NULL, NULL, NULL);
            }
        }
    }
}

// The same on a padded copy, for sizes that vectors or groups do not divide.
static void walk_padded(const token *tokens, int64_t n, int64_t value, int64_t values, float *state,
                        int64_t d, float *s) {
    const int64_t ld = qrt_padded(d);
    memset(s, 0, (size_t)(QRT_DELTA_ROWS * ld) * sizeof *s);
    for (int64_t r = 0; r < values; r++) memcpy(s + r * ld, state + r * d, (size_t)d * sizeof *s);
    walk_rows(tokens, n, value, values, s, ld);
    for (int64_t r = 0; r < values; r++) memcpy(state + r * d, s + r * ld, (size_t)d * sizeof *s);
}

// Rows of a head's state in a slot, from row `value`.
INLINE float *state_at(const qrt_op *op, const qrt_state *st, int32_t slot, int64_t head,
                       int64_t value) {
    int64_t layer = (int64_t)slot * st->delta_layers + op->layer;
    return st->delta + ((layer * st->v_heads + head) * st->d + value) * st->d;
}

// All rows that sequence s has in the step, for rows `value` .. `last` of a head's state.
static void walk(const qrt_op *op, const qrt_ctx *c, int64_t s, int64_t h, int64_t value,
                 int64_t last) {
    const qrt_state *st = c->state;
    const qrt_batch *b = c->batch;
    const int64_t d = st->d;
    float *state = state_at(op, st, b->slots[s], h, value);
    float *padded = (float *)(void *)c->scratch, *copies = padded + QRT_DELTA_ROWS * qrt_padded(d);
    token tokens[QRT_DELTA_TOKENS];
    const size_t bytes = (size_t)((last - value) * d) * sizeof(float);
    if (b->starts[s] == 0) {
        memset(state, 0, bytes);
    } else if (b->sources[s] != b->slots[s]) {
        memcpy(state, state_at(op, st, b->sources[s], h, value), bytes);
    }
    // Some tokens at a time, and no further than to the next save: cutting a walk changes no bit.
    const int64_t end = b->row_offsets[s + 1];
    int32_t save = qrt_first_save(b, b->row_offsets[s]);
    for (int64_t row = b->row_offsets[s], n; row < end; row += n) {
        const int64_t stop =
            save < b->n_saves && b->save_rows[save] < end ? b->save_rows[save] + 1 : end;
        n = stop - row < QRT_DELTA_TOKENS ? stop - row : QRT_DELTA_TOKENS;
        prepare(op, row, n, h, copies, tokens);
        for (int64_t at = value; at < last; at += QRT_DELTA_ROWS) {
            const int64_t values = last - at < QRT_DELTA_ROWS ? last - at : QRT_DELTA_ROWS;
            float *part = state + (at - value) * d;
            if (d % QF || d % GROUP) {
                walk_padded(tokens, n, at, values, part, d, padded);
            } else {
                walk_rows(tokens, n, at, values, part, d);
            }
        }
        if (save < b->n_saves && row + n == b->save_rows[save] + 1)
            memcpy(state_at(op, st, b->save_slots[save++], h, value), state, bytes);
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
    int64_t unit, end;
    if (even) {
        qrt_share(c, units, &unit, &end);
    } else {
        unit = qrt_take(c) * together, end = unit + together;
    }
    while (unit < end && unit < units) {
        while (unit < end) { // parts of one head at a time
            const int64_t part = unit % parts, left = parts - part,
                          n = end - unit < left ? end - unit : left, head = unit / parts,
                          last = (part + n) * QRT_DELTA_ROWS;
            walk(op, c, head / heads, head % heads, part * QRT_DELTA_ROWS, last < d ? last : d);
            unit += n;
        }
        if (!even) unit = qrt_take(c) * together, end = unit + together;
    }
}

void QRT_FILL(delta_net)(qrt_kernels *k);
void QRT_FILL(delta_net)(qrt_kernels *k) { k->op[QRT_DELTA_NET] = delta_net; }

// Level driver: delta_net, kv_append and attention, with several sequences, splits and dirty slots
// and pages.
#include "levels.h"

// One head of one sequence in double: rows from..to of q, k, v and gates -> out, state [d value][d
// key].
typedef struct {
    int k_heads, v_heads, d;
} delta_shape;

// qkv: q heads, k heads, v heads side by side
static void delta_head(delta_shape s, int h, const float *qkv, const float *gates, int rows,
                       double *state, double *out) {
    const int d = s.d, width = (2 * s.k_heads + s.v_heads) * d;
    for (int t = 0; t < rows; t++, qkv += width, gates += 2 * s.v_heads, out += s.v_heads * d) {
        const float *q = qkv + h % s.k_heads * d, *k = q + s.k_heads * d,
                    *v = qkv + (2 * s.k_heads + h) * d;
        for (int i = 0; i < d; i++) {
            double *row = state + i * d, seen = 0, sum = 0;
            for (int j = 0; j < d; j++) seen += (row[j] *= exp(gates[h])) * k[j];
            const double update = gates[s.v_heads + h] * (v[i] - seen);
            for (int j = 0; j < d; j++) sum += (row[j] += update * k[j]) * q[j];
            out[h * d + i] = sum;
        }
    }
}

// Sequence 0 begins in slot 2; sequence 1 goes on from slot 1 in slot 0. Saved: row 4, the last row
// of sequence 0, and a row of sequence 1, in slots that hold NaN beforehand.
static void delta_net(delta_shape s) {
    enum { ROWS = 40, LAYERS = 2, SLOTS = 6, SAVES = 3 };
    const int d = s.d, width = (2 * s.k_heads + s.v_heads) * d, out_width = s.v_heads * d;
    const int64_t one = (int64_t)out_width * d, all = SLOTS * LAYERS * one, used = 3 * LAYERS * one;
    int32_t offsets[3] = {0, 25, ROWS}, starts[2] = {0, 7}, slots[2] = {2, 0}, sources[2] = {2, 1};
    int32_t save_rows[SAVES] = {4, 24, 30}, save_slots[SAVES] = {5, 3, 4};
    float *x = random_floats(ROWS * width, 0.5), *gates = random_floats(ROWS * 2 * s.v_heads, 1);
    float *before = memcpy(unset_floats(all), random_floats(used, 0.3), (size_t)(4 * used)),
          *after = copy_of(before, 4 * all), *pieces = copy_of(before, 4 * all);
    float *out = unset_floats(ROWS * out_width), *again = unset_floats(ROWS * out_width);
    double *want = doubles(ROWS * out_width), *want_state = doubles(2 * one);
    name_case("delta_net %d, %d heads of %d", s.k_heads, s.v_heads, d);
    for (int t = 0; t < ROWS; t++) {
        for (int h = 0; h < 2 * s.k_heads; h++) { // unit vectors; q is scaled
            float *v = x + t * width + h * d;
            double squares = 0;
            for (int i = 0; i < d; i++) squares += v[i] * v[i];
            for (int i = 0; i < d; i++) v[i] /= (float)sqrt(squares * (h < s.k_heads ? d : 1));
        }
        for (int h = 0; h < s.v_heads; h++) { // decay near 1, somewhere, near 0 at times
            float *g = gates + t * 2 * s.v_heads + h;
            *g = -fabsf(*g) * (h % 3 == 0 ? 0.001f : h % 3 == 1 ? 1 : t % 7 == 0 ? 100 : 0.1f);
            g[s.v_heads] = (float)sigmoid(g[s.v_heads]);
        }
    }
    for (int q = 0; q < 2; q++)
        for (int h = 0; h < s.v_heads; h++) {
            const int64_t at = (sources[q] * LAYERS + 1) * one + (int64_t)h * d * d;
            double *state = want_state + q * one + h * d * d;
            for (int i = 0; i < d * d; i++) state[i] = starts[q] ? before[at + i] : 0;
            delta_head(s, h, x + offsets[q] * width, gates + offsets[q] * 2 * s.v_heads,
                       offsets[q + 1] - offsets[q], state, want + offsets[q] * out_width);
        }
    qrt_state pools = {.delta = after, .delta_layers = LAYERS, .v_heads = s.v_heads, .d = d};
    qrt_batch batch = {.n_rows = ROWS,
                       .n_seqs = 2,
                       .n_saves = SAVES,
                       .row_offsets = offsets,
                       .starts = starts,
                       .slots = slots,
                       .sources = sources,
                       .save_rows = save_rows,
                       .save_slots = save_slots};
    qrt_op op = {
        .kind = QRT_DELTA_NET,
        .layer = 1,
        .in = {view(x, width, s.k_heads, d, d), view(x + s.k_heads * d, width, s.k_heads, d, d),
               view(x + 2 * s.k_heads * d, width, s.v_heads, d, d), rows_of(gates, 2 * s.v_heads)},
        .out = rows_of(out, out_width)};
    run_op(&op, &batch, &pools, 2);
    check_near("out", out, want, ROWS * out_width, 2e-6);
    for (int q = 0; q < 2; q++)
        check_near("state", after + (slots[q] * LAYERS + 1) * one, want_state + q * one, one, 2e-6);
    check_same("state of another slot", after + 2 * one, before + 2 * one, 4 * 2 * one);
    for (int q = 0; q < SLOTS; q++)
        check_same("state of another layer", after + 2 * q * one, before + 2 * q * one, 4 * one);
    const int cuts[] = {0, 1, 2, 4, 5, 6, 25, 31, ROWS};
    pools.delta = pieces;
    for (int k = 0; k < 8; k++) {
        const int q = k > 5;
        int32_t piece[2] = {0, cuts[k + 1] - cuts[k]},
                start[1] = {starts[q] + cuts[k] - offsets[q]};
        qrt_batch part = {.n_rows = piece[1],
                          .n_seqs = 1,
                          .row_offsets = piece,
                          .starts = start,
                          .slots = slots + q,
                          .sources = k == 6 ? sources + 1 : slots + q};
        qrt_op p = op;
        for (int i = 0; i < 3; i++) p.in[i].ptr += cuts[k] * width;
        p.in[3].ptr += cuts[k] * 2 * s.v_heads;
        p.out.ptr = again + cuts[k] * out_width;
        run_op(&p, &part, &pools, 1 + k % 3);
        for (int i = 0; i < SAVES; i++) {
            if (cuts[k + 1] != save_rows[i] + 1) continue;
            check_same("saved state", after + (save_slots[i] * LAYERS + 1) * one,
                       pieces + (slots[q] * LAYERS + 1) * one, 4 * one);
        }
    }
    check_same("pieces", out, again, 4 * ROWS * out_width);
    check_same("state after pieces", after, pieces, 4 * 2 * LAYERS * one);
    check_same("state after pieces", after + 5 * one, pieces + 5 * one, 4 * one);
    release_all();
}

// Sequence A is `a` rows of prefill; B has `b_start` tokens in its pages and adds b_rows.
typedef struct {
    int heads, kv_heads, dim, page_tokens, a, b_start, b_rows;
} attention_shape;

// Rows of query heads against the first keys of a sequence; k, v: [tokens, kv_heads, dim].
static void attend_plainly(const attention_shape *s, const float *q, const float *k, const float *v,
                           int start, int rows, double *out) {
    const int64_t ld = (int64_t)s->kv_heads * s->dim;
    double *p = malloc(sizeof(double) * (size_t)(start + rows));
    for (int t = 0; t < rows; t++)
        for (int h = 0; h < s->heads; h++) {
            const int n = start + t + 1;
            const int64_t head = h / (s->heads / s->kv_heads) * (int64_t)s->dim,
                          at = ((int64_t)t * s->heads + h) * s->dim;
            double top = -INFINITY, sum = 0;
            for (int j = 0; j < n; j++) {
                double dot = 0;
                for (int i = 0; i < s->dim; i++) dot += (double)q[at + i] * k[j * ld + head + i];
                p[j] = dot / sqrt(s->dim);
                if (p[j] > top) top = p[j];
            }
            for (int j = 0; j < n; j++) sum += p[j] = exp(p[j] - top);
            for (int i = 0; i < s->dim; i++) out[at + i] = 0;
            for (int j = 0; j < n; j++)
                for (int i = 0; i < s->dim; i++) out[at + i] += p[j] / sum * v[j * ld + head + i];
        }
    free(p);
}

static void append(const attention_shape *s, float *k, float *v, const qrt_state *state,
                   const qrt_batch *batch) {
    const int width = s->kv_heads * s->dim;
    qrt_op op = {.kind = QRT_KV_APPEND,
                 .layer = 1,
                 .in = {view(k, width, s->kv_heads, s->dim, s->dim),
                        view(v, width, s->kv_heads, s->dim, s->dim)}};
    run_op(&op, batch, state, 2);
}

static void attend(qrt_op op, int64_t row, float *out, const qrt_state *state,
                   const qrt_batch *batch, int threads) {
    op.kind = QRT_ATTENTION;
    op.in[0].ptr += row * op.in[0].ld;
    op.out.ptr = out + row * op.out.ld;
    run_op(&op, batch, state, threads);
    op.kind = QRT_ATTENTION_MERGE;
    run_op(&op, batch, state, threads);
}

// What pages hold of x [tokens, kv_heads, dim] of sequence q: x itself, or rounded to float16.
static void read_pages(const attention_shape *s, const qrt_state *state, const void *pool,
                       const int32_t *pages, int tokens, float *x) {
    for (int j = 0; j < tokens; j++)
        for (int g = 0; g < s->kv_heads; g++) {
            int64_t at = (((int64_t)state->n_pages + pages[j / s->page_tokens]) * s->kv_heads + g) *
                         s->page_tokens;
            at = (at + j % s->page_tokens) * s->dim;
            float *to = x + ((int64_t)j * s->kv_heads + g) * s->dim;
            for (int i = 0; i < s->dim; i++) {
                const uint8_t *from = (const uint8_t *)pool + (at + i) * state->kv_bytes;
                const float value =
                    state->kv_bytes == 4 ? *(const float *)(const void *)from : qrt_half(from);
                check("kept value", fabsf(value - to[i]) <=
                                        (state->kv_bytes == 4 ? 0 : 5e-4f * fabsf(to[i]) + 1e-7f));
                to[i] = value;
            }
        }
}

static void attention(attention_shape s, int kv_bytes) {
    enum { LAYERS = 2 };
    const int b = s.b_start + s.b_rows, rows = s.a + s.b_rows, width = s.kv_heads * s.dim,
              out_width = s.heads * s.dim;
    const int pages_a = (s.a + s.page_tokens - 1) / s.page_tokens,
              pages_b = (b + s.page_tokens - 1) / s.page_tokens;
    const int n_pages = pages_a + pages_b + 1, wide = pages_a > pages_b ? pages_a : pages_b;
    const int64_t pool = (int64_t)LAYERS * n_pages * s.page_tokens * width * kv_bytes;
    void *k_pool = memset(take(pool), 0xff, (size_t)pool),
         *v_pool = memset(take(pool), 0xff, (size_t)pool); // NaN
    int32_t *order = take(4 * n_pages), *pages = take(8 * wide);
    for (int i = 0; i < n_pages; i++) order[i] = i;
    for (int i = n_pages - 1; i > 0; i--) {
        const int j = (int)((uniform() + 1) / 2 * (i + 0.999)), swapped = order[i];
        order[i] = order[j], order[j] = swapped;
    }
    for (int i = 0; i < 2 * wide; i++) pages[i] = -1;
    for (int i = 0; i < pages_a; i++) pages[i] = order[i];
    for (int i = 0; i < pages_b; i++) pages[wide + i] = order[pages_a + i];
    const qrt_state state = {.k = k_pool,
                             .v = v_pool,
                             .kv_bytes = kv_bytes,
                             .n_pages = n_pages,
                             .page_tokens = s.page_tokens,
                             .kv_heads = s.kv_heads,
                             .head_dim = s.dim,
                             .attention_layers = LAYERS};
    name_case("attention %d/%d x %d, pages of %d, %d bytes", s.heads, s.kv_heads, s.dim,
              s.page_tokens, kv_bytes);

    float *k = random_floats((int64_t)(s.a + b) * width, 1),
          *v = random_floats((int64_t)(s.a + b) * width, 1);
    int32_t offsets[3] = {0, s.a, s.a + s.b_start}, starts[2] = {0, 0};
    qrt_batch batch = {.n_rows = s.a + s.b_start,
                       .n_seqs = s.b_start ? 2 : 1,
                       .page_width = wide,
                       .row_offsets = offsets,
                       .starts = starts,
                       .pages = pages};
    append(&s, k, v, &state, &batch);
    int32_t rest[2] = {0, s.b_rows}, rest_start[1] = {s.b_start};
    batch = (qrt_batch){.n_rows = s.b_rows,
                        .n_seqs = 1,
                        .page_width = wide,
                        .row_offsets = rest,
                        .starts = rest_start,
                        .pages = pages + wide};
    const int64_t done = (int64_t)(s.a + s.b_start) * width;
    append(&s, k + done, v + done, &state, &batch);
    const int64_t own_b = (int64_t)s.a * width;
    read_pages(&s, &state, k_pool, pages, s.a, k),
        read_pages(&s, &state, k_pool, pages + wide, b, k + own_b);
    read_pages(&s, &state, v_pool, pages, s.a, v),
        read_pages(&s, &state, v_pool, pages + wide, b, v + own_b);

    float *q = random_floats((int64_t)rows * out_width, 2),
          *out = unset_floats((int64_t)rows * out_width);
    float *again = unset_floats((int64_t)rows * out_width);
    double *want = doubles((int64_t)rows * out_width);
    attend_plainly(&s, q, k, v, 0, s.a, want);
    attend_plainly(&s, q + (int64_t)s.a * out_width, k + own_b, v + own_b, s.b_start, s.b_rows,
                   want + (int64_t)s.a * out_width);
    offsets[2] = rows, starts[1] = s.b_start;
    batch = (qrt_batch){.n_rows = rows,
                        .n_seqs = 2,
                        .page_width = wide,
                        .row_offsets = offsets,
                        .starts = starts,
                        .pages = pages};
    const qrt_op op = {.layer = 1,
                       .n = {s.kv_heads},
                       .in = {view(q, out_width, s.heads, s.dim, s.dim)},
                       .out = rows_of(out, out_width)};
    attend(op, 0, out, &state, &batch, 2);
    check_near("out", out, want, (int64_t)rows * out_width, 3e-6);
    for (int step = 1; step <= 5;
         step += 4) // single rows (only some of the long prompt) and pieces
        for (int seq = 0; seq < 2; seq++)
            for (int t = offsets[seq]; t < offsets[seq + 1]; t += step) {
                if (step == 1 && seq == 0 && t % 7) continue;
                const int m = offsets[seq + 1] - t < step ? offsets[seq + 1] - t : step;
                int32_t piece[2] = {0, m}, start[1] = {starts[seq] + t - offsets[seq]};
                qrt_batch part = {.n_rows = m,
                                  .n_seqs = 1,
                                  .page_width = wide,
                                  .row_offsets = piece,
                                  .starts = start,
                                  .pages = pages + seq * wide};
                attend(op, t, again, &state, &part, 1 + t % 3);
                check_same(step == 1 ? "single rows" : "pieces", again + (int64_t)t * out_width,
                           out + (int64_t)t * out_width, 4ll * m * out_width);
            }
    release_all();
}

void test_state(void) {
    const delta_shape deltas[] = {{2, 4, 16}, {2, 6, 128}, {3, 3, 64}, {1, 2, 32},
                                  {2, 2, 20}, {1, 1, 18},  {1, 2, 40}};
    for (int i = 0; i < 7; i++) delta_net(deltas[i]);
    const attention_shape shapes[] = {{4, 2, 256, 64, 10, 520, 3}, {2, 1, 32, 64, 70, 1100, 3},
                                      {4, 2, 64, 16, 140, 5, 20},  {6, 1, 128, 64, 20, 63, 1},
                                      {8, 1, 64, 64, 10, 64, 20},  {3, 3, 40, 8, 80, 50, 9},
                                      {10, 1, 32, 64, 20, 0, 9},   {4, 2, 20, 6, 50, 43, 9}};
    for (int i = 0; i < 8; i++) attention(shapes[i], 2), attention(shapes[i], 4);
}

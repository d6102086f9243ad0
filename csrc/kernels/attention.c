// Causal softmax attention over float16 or float32 pages, without a score matrix: keys are taken in
// blocks of at most QRT_KEYS with a running maximum. A row's sums always run in the same order (a
// dot product in one vector along dim, keys one after another, pieces of QRT_SPLIT_PAGES pages
// joined in order), whatever tile it sits in, so that its result depends neither on the other rows
// of a step nor on threads.
#include "kernels.h"
#include "scratch.h"

#define NEVER -1e30f // a score that no key has

// Rows first .. first + rows of a sequence, with all heads of one kv head: row i of the tile is row
// i / group, head i % group.
typedef struct {
    int64_t row;   // of the step
    int64_t start; // tokens before it
    int rows, group, queries, kv_head;
    const int32_t *pages;
} tile;

// A thread's buffers; ld: padded dim.
typedef struct {
    float *q, *sum, *joined; // [queries][ld]
    float *score;            // [queries][QRT_KEYS]
    float *top, *total, *joined_top, *joined_total, *factor;
    float *keys, *values; // converted: [QRT_KEY_CHUNK][ld], [QRT_KEYS][4 * QF]
    int64_t ld, dim;
} buffers;

INLINE buffers carve(const qrt_ctx *c, int64_t queries, int64_t dim) {
    int64_t ld = qrt_padded(dim);
    float *p = (float *)(void *)c->scratch;
    buffers b = {.ld = ld, .dim = dim};
    b.q = p, p += queries * ld;
    b.sum = p, p += queries * ld;
    b.joined = p, p += queries * ld;
    b.keys = p, p += QRT_KEY_CHUNK * ld;
    b.values = p, p += QRT_KEYS * 4 * QRT_MAX_LANES;
    b.score = p, p += queries * QRT_KEYS;
    b.top = p, p += queries;
    b.total = p, p += queries;
    b.joined_top = p, p += queries;
    b.joined_total = p, p += queries;
    b.factor = p;
    return b;
}

// Functions below that take `bytes` read elements of that size from pages: 2 (float16) or 4
// (float32). It is a constant at each call, so that they are compiled for both.
INLINE const void *element(const void *p, int64_t i, const int bytes) {
    return (const uint8_t *)p + i * bytes;
}
INLINE qf qf_stored(const void *p, const int bytes) {
    return bytes == 2 ? qf_from_f16(p) : qf_load(p);
}

INLINE void convert(float *to, const void *from, int64_t n, int64_t padded, const int bytes) {
    int64_t i = 0;
    for (; i + QF <= n; i += QF) qf_store(to + i, qf_stored(element(from, i, bytes), bytes));
    for (; i < padded; i++) {
        const void *x = element(from, i, bytes);
        to[i] = i >= n ? 0 : bytes == 2 ? qrt_half(x) : *(const float *)x;
    }
}

// Rows that will be read soon. They are fetched into the second-level cache a few lines at a time
// while others are worked on: pages lie anywhere, and the processor's own prefetching stops at
// their ends.
typedef struct {
    const uint8_t *at, *end;
    int64_t step; // bytes of one call
} stream;

INLINE stream stream_of(const void *p, int64_t n, int64_t calls) {
    const uint8_t *at = p;
    return (stream){at, at + n, (n / calls + 63) / 64 * 64};
}

INLINE void fetch(stream *s) {
    for (int64_t i = 0; i < s->step && s->at < s->end; i += 64, s->at += 64)
        __builtin_prefetch(s->at, 0, 2);
}

// Dot products of nq queries with nk keys (both at most 4, one of them 4): score[i * QRT_KEYS + j].
INLINE void dots(const float *q, int64_t q_ld, int nq, const void *const *key, int nk, int64_t dim,
                 float *score, const int bytes) {
    qf acc[4][4], zero = qf_zero();
    for (int i = 0; i < nq; i++) {
        for (int j = 0; j < nk; j++) acc[i][j] = zero;
    }
    for (int64_t d = 0; d < dim; d += QF) {
        qf k[4];
        for (int j = 0; j < nk; j++) k[j] = qf_stored(element(key[j], d, bytes), bytes);
        for (int i = 0; i < nq; i++) {
            const qf x = qf_held(qf_load(q + i * q_ld + d));
            for (int j = 0; j < nk; j++) acc[i][j] = qf_fma(x, k[j], acc[i][j]);
        }
    }
    float out[4];
    if (nk == 4) {
        for (int i = 0; i < nq; i++)
            qf_hsum4(score + i * QRT_KEYS, acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
        return;
    }
    for (int j = 0; j < nk; j++) {
        qf_hsum4(out, acc[0][j], nq > 1 ? acc[1][j] : zero, nq > 2 ? acc[2][j] : zero,
                 nq > 3 ? acc[3][j] : zero);
        for (int i = 0; i < nq; i++) score[i * QRT_KEYS + j] = out[i];
    }
}

// Few queries: keys are read as they are stored. n keys, the last of which serves for those that
// fill up a pair.
INLINE void scores_direct(const buffers *b, int nq, int at, const void *k, int n, stream *next,
                          const int bytes) {
    for (int j = 0; j < n; j += 2) {
        const void *key[2] = {element(k, j * b->dim, bytes),
                              element(k, (j + 1 < n ? j + 1 : j) * b->dim, bytes)};
        dots(b->q + at * b->ld, b->ld, nq, key, 2, b->dim, b->score + at * QRT_KEYS + j, bytes);
        fetch(next);
    }
}

// score[i][j] for all queries and n keys; columns behind n may be written too. Meanwhile the
// block's values, at v, are fetched.
INLINE void scores(const buffers *b, int queries, const void *k, const void *v, int n, bool direct,
                   const int bytes) {
    if (direct) {
        stream next = stream_of(v, n * b->dim * bytes, (n + 1) / 2);
        int i = 0;
        for (; i + 4 <= queries; i += 4) scores_direct(b, 4, i, k, n, &next, bytes);
        if (queries - i == 3) scores_direct(b, 3, i, k, n, &next, bytes);
        if (queries - i == 2) scores_direct(b, 2, i, k, n, &next, bytes);
        if (queries - i == 1) scores_direct(b, 1, i, k, n, &next, bytes);
        return;
    }
    stream next = stream_of(v, n * b->dim * bytes,
                            (n + QRT_KEY_CHUNK - 1) / QRT_KEY_CHUNK * ((queries + 2) / 3));
    for (int chunk = 0; chunk < n; chunk += QRT_KEY_CHUNK) {
        int m = n - chunk < QRT_KEY_CHUNK ? n - chunk : QRT_KEY_CHUNK;
        for (int j = 0; j < m; j++)
            convert(b->keys + j * b->ld, element(k, (chunk + j) * b->dim, bytes), b->dim, b->ld,
                    bytes);
        for (int i = 0; i < queries; i += 3) {
            const float *q = b->q + i * b->ld;
            fetch(&next);
            for (int j = 0; j < m; j += 4) {
                const void *key[4];
                for (int t = 0; t < 4; t++) key[t] = b->keys + (j + t < m ? j + t : m - 1) * b->ld;
                float *to = b->score + i * QRT_KEYS + chunk + j;
                if (queries - i >= 3) {
                    dots(q, b->ld, 3, key, 4, b->ld, to, 4);
                } else if (queries - i == 2) {
                    dots(q, b->ld, 2, key, 4, b->ld, to, 4);
                } else {
                    dots(q, b->ld, 1, key, 4, b->ld, to, 4);
                }
            }
        }
    }
}

// Scores of one query become weights e^(score - top), 0 behind the n keys that it may see; returns
// the factor for what was summed under the maximum so far.
INLINE float soften(float *score, int n, float *top, float *total) {
    for (int j = n; j < QRT_KEYS; j++) score[j] = NEVER;
    qf m = qf_load(score);
    for (int j = QF; j < QRT_KEYS; j += QF) m = qf_max(m, qf_load(score + j));
    float high = qf_hmax(m), before = *top;
    if (before > high) high = before;
    qf h = qf_set1(high);
    float e[QF];
    qf_store(e, qf_exp(qf_sub(qf_set1(before), h)));
    for (int j = 0; j < n; j += QF) qf_store(score + j, qf_exp(qf_sub(qf_load(score + j), h)));
    for (int j = n; j < QRT_KEYS; j++) score[j] = 0;
    qf sum = qf_load(score);
    for (int j = QF; j < QRT_KEYS; j += QF) sum = qf_add(sum, qf_load(score + j));
    *top = high;
    *total = *total * e[0] + qf_hsum(sum);
    return e[0];
}

// sum[i] = factor[i] * sum[i] + sum over n keys of weight[i][j] * value[j], for nq queries and nv
// vectors of columns
INLINE void weigh(float *sum, int64_t ld, int nq, const float *weight, const float *factor,
                  const void *value, int64_t value_ld, int nv, int n, const int bytes) {
    qf acc[4][4];
    for (int i = 0; i < nq; i++) {
        for (int t = 0; t < nv; t++)
            acc[i][t] = qf_mul(qf_set1(factor[i]), qf_load(sum + i * ld + t * QF));
    }
    for (int j = 0; j < n; j++) {
        qf v[4];
        for (int t = 0; t < nv; t++)
            v[t] = qf_stored(element(value, j * value_ld + t * QF, bytes), bytes);
        for (int i = 0; i < nq; i++) {
            qf w = qf_set1(weight[i * QRT_KEYS + j]);
            for (int t = 0; t < nv; t++) acc[i][t] = qf_fma(w, v[t], acc[i][t]);
        }
    }
    for (int i = 0; i < nq; i++) {
        for (int t = 0; t < nv; t++) qf_store(sum + i * ld + t * QF, acc[i][t]);
    }
}

// Few queries: values are read as they are stored, some rows with all columns at a time.
INLINE void weigh_direct(const buffers *b, int nq, int at, const float *factor, const void *v,
                         int n, stream *next, const int bytes) {
    const float ones[4] = {1, 1, 1, 1}, *f = factor + at;
    for (int j = 0; j < n; j += QRT_KEY_CHUNK, f = ones) {
        int m = n - j < QRT_KEY_CHUNK ? n - j : QRT_KEY_CHUNK;
        const float *weight = b->score + at * QRT_KEYS + j;
        const void *rows = element(v, j * b->dim, bytes);
        float *sum = b->sum + at * b->ld;
        int64_t d = 0;
        for (; d + 2 * QF <= b->dim; d += 2 * QF) {
            weigh(sum + d, b->ld, nq, weight, f, element(rows, d, bytes), b->dim, 2, m, bytes);
            fetch(next);
        }
        if (d < b->dim)
            weigh(sum + d, b->ld, nq, weight, f, element(rows, d, bytes), b->dim, 1, m, bytes);
    }
}

INLINE void weigh_converted(const buffers *b, int nq, int at, int64_t d, const float *factor,
                            int nv, int n) {
    weigh(b->sum + at * b->ld + d, b->ld, nq, b->score + at * QRT_KEYS, factor + at, b->values,
          4 * QF, nv, n, 4);
}

// sum = factor * sum + weights @ values for all queries and n keys. Meanwhile the next block's n
// keys, at k, are fetched (NULL: there is none).
INLINE void weigh_values(const buffers *b, int queries, const float *factor, const void *v,
                         const void *k, int n, bool direct, const int bytes) {
    const int64_t ahead = k ? n * b->dim * bytes : 0;
    if (direct) {
        stream next = stream_of(
            k, ahead, (n + QRT_KEY_CHUNK - 1) / QRT_KEY_CHUNK * ((b->dim + 2 * QF - 1) / (2 * QF)));
        int i = 0;
        for (; i + 4 <= queries; i += 4) weigh_direct(b, 4, i, factor, v, n, &next, bytes);
        if (queries - i == 3) weigh_direct(b, 3, i, factor, v, n, &next, bytes);
        if (queries - i == 2) weigh_direct(b, 2, i, factor, v, n, &next, bytes);
        if (queries - i == 1) weigh_direct(b, 1, i, factor, v, n, &next, bytes);
        return;
    }
    stream next = stream_of(k, ahead, (b->ld + 4 * QF - 1) / (4 * QF) * ((queries + 2) / 3));
    for (int64_t d = 0; d < b->ld; d += 4 * QF) {
        int64_t width = b->ld - d < 4 * QF ? b->ld - d : 4 * QF,
                real = b->dim - d < width ? b->dim - d : width;
        int nv = (int)(width / QF), i = 0;
        for (int j = 0; j < n; j++)
            convert(b->values + j * 4 * QF, element(v, j * b->dim + d, bytes), real, width, bytes);
        for (; i + 3 <= queries && nv == 4; i += 3) {
            weigh_converted(b, 3, i, d, factor, 4, n);
            fetch(&next);
        }
        for (; i < queries; i++) {
            if (nv == 4) weigh_converted(b, 1, i, d, factor, 4, n);
            if (nv == 3) weigh_converted(b, 1, i, d, factor, 3, n);
            if (nv == 2) weigh_converted(b, 1, i, d, factor, 2, n);
            if (nv == 1) weigh_converted(b, 1, i, d, factor, 1, n);
        }
    }
}

// Joins a later piece's sums to those of the pieces before it.
INLINE void join(float *joined, float *joined_top, float *joined_total, const float *sum, float top,
                 float total, int64_t ld) {
    float high = top > *joined_top ? top : *joined_top, e[QF], f[QF];
    qf a = qf_exp(qf_set1(*joined_top - high)), b = qf_exp(qf_set1(top - high));
    qf_store(e, a), qf_store(f, b);
    *joined_top = high;
    *joined_total = *joined_total * e[0] + total * f[0];
    for (int64_t d = 0; d < ld; d += QF) {
        qf_store(joined + d, qf_fma(qf_load(sum + d), b, qf_mul(qf_load(joined + d), a)));
    }
}

INLINE void finish(float *out, const float *joined, float total, int64_t dim) {
    qf scale = qf_set1(1.0f / total);
    int64_t d = 0;
    for (; d + QF <= dim; d += QF) qf_store(out + d, qf_mul(qf_load(joined + d), scale));
    if (d < dim)
        qf_store_part(out + d, qf_mul(qf_load_part(joined + d, (int)(dim - d)), scale),
                      (int)(dim - d));
}

INLINE const float *query_at(const qrt_op *op, const tile *t, int i) {
    const qrt_view *q = &op->in[0];
    return q->ptr + (t->row + i / t->group) * q->ld +
           (int64_t)(t->kv_head * t->group + i % t->group) * q->stride;
}

static void load_queries(const qrt_op *op, const tile *t, const buffers *b) {
    float scale = 1.0f / sqrtf((float)b->dim);
    for (int i = 0; i < t->queries; i++) {
        const float *from = query_at(op, t, i);
        float *to = b->q + i * b->ld;
        for (int64_t d = 0; d < b->ld; d++) to[d] = d < b->dim ? from[d] * scale : 0;
    }
}

// Where the key row (or value row) of a token lies in a pool.
INLINE int64_t row_at(const qrt_op *op, const qrt_state *st, const tile *t, int64_t key) {
    int64_t page = (int64_t)op->layer * st->n_pages + t->pages[key / st->page_tokens];
    return ((page * st->kv_heads + t->kv_head) * st->page_tokens + key % st->page_tokens) *
           st->head_dim;
}

// One piece: the pages of number piece * QRT_SPLIT_PAGES and following -> sum, top, total of each
// query.
INLINE void attend_as(const int bytes, const qrt_op *op, const qrt_state *st, const tile *t,
                      const buffers *b, int64_t piece) {
    const int64_t tokens = st->page_tokens,
                  seen = t->start + t->rows; // keys that the last row sees
    const int64_t block = tokens < QRT_KEYS ? tokens : QRT_KEYS;
    const bool direct = t->queries <= 8 && b->dim % QF == 0;
    int64_t key = piece * QRT_SPLIT_PAGES * tokens, end = key + QRT_SPLIT_PAGES * tokens;
    if (end > seen) end = seen;
    float *factor = b->factor;
    memset(b->sum, 0, (size_t)(t->queries * b->ld) * sizeof(float));
    for (int i = 0; i < t->queries; i++) b->top[i] = NEVER, b->total[i] = 0;
    while (key < end) {
        int64_t left = tokens - key % tokens, at = row_at(op, st, t, key);
        int n = (int)(end - key < block ? end - key : block);
        if (n > left) n = (int)left;
        const void *k = element(st->k, at, bytes), *v = element(st->v, at, bytes), *next = NULL;
        scores(b, t->queries, k, v, n, direct, bytes);
        for (int i = 0; i < t->queries; i++) {
            int64_t own = t->start + i / t->group + 1 - key; // keys of this block that the row sees
            if (own <= 0) {
                // Nothing of this block, and the piece must stay as it was for this row.
                memset(b->score + i * QRT_KEYS, 0, QRT_KEYS * sizeof(float));
                factor[i] = 1;
            } else {
                factor[i] = soften(b->score + i * QRT_KEYS, own < n ? (int)own : n, b->top + i,
                                   b->total + i);
            }
        }
        if (key + n < end) next = element(st->k, row_at(op, st, t, key + n), bytes);
        weigh_values(b, t->queries, factor, v, next, n, direct, bytes);
        key += n;
    }
}

#define ATTEND(bytes)                                                                              \
    static __attribute__((noinline)) void attend_##bytes(                                          \
        const qrt_op *op, const qrt_state *st, const tile *t, const buffers *b, int64_t piece) {   \
        attend_as(bytes, op, st, t, b, piece);                                                     \
    }
ATTEND(2)
ATTEND(4)

static void attend(const qrt_op *op, const qrt_state *st, const tile *t, const buffers *b,
                   int64_t piece) {
    if (st->kv_bytes == 4) {
        attend_4(op, st, t, b, piece);
    } else {
        attend_2(op, st, t, b, piece);
    }
}

static int64_t pieces_of(const qrt_state *st, int64_t keys) {
    int64_t span = (int64_t)QRT_SPLIT_PAGES * st->page_tokens;
    return (keys + span - 1) / span;
}

static int64_t longest(const qrt_ctx *c) {
    const qrt_batch *b = c->batch;
    int64_t most = 0;
    for (int s = 0; s < b->n_seqs; s++) {
        int64_t keys = b->starts[s] + b->row_offsets[s + 1] - b->row_offsets[s];
        if (keys > most) most = keys;
    }
    return pieces_of(c->state, most);
}

// Whether the pieces of a row go to different threads, to be joined by attention_merge.
static bool is_split(const qrt_op *op, const qrt_ctx *c) {
    return c->batch->n_rows <= qrt_attention_split_rows(c->threads, op->n[0]) && longest(c) > 1;
}

// Shared scratch in a split step: of row r, head h, piece p.
INLINE float *partial(const qrt_ctx *c, int64_t heads, int64_t r, int64_t h, int64_t p,
                      int64_t pieces, int64_t ld) {
    return (float *)(void *)c->shared + ((r * heads + h) * pieces + p) * (ld + QRT_MAX_LANES);
}

// Tile number `number` counted over all sequences, the longest (last rows) of each first; false:
// there are no more.
static bool tile_at(const qrt_op *op, const qrt_ctx *c, int64_t number, tile *t) {
    const qrt_batch *b = c->batch;
    int group = op->in[0].heads / op->n[0], height = qrt_attention_tile_rows(group);
    for (int s = 0; s < b->n_seqs; s++) {
        int64_t rows = b->row_offsets[s + 1] - b->row_offsets[s],
                tiles = (rows + height - 1) / height;
        if (number >= tiles) {
            number -= tiles;
            continue;
        }
        int64_t first = (tiles - 1 - number) * height;
        t->row = b->row_offsets[s] + first;
        t->start = b->starts[s] + first;
        t->rows = (int)(rows - first < height ? rows - first : height);
        t->group = group;
        t->queries = t->rows * group;
        t->pages = b->pages + (int64_t)s * b->page_width;
        return true;
    }
    return false;
}

// q: [T, heads, dim]   k, v: pages of the state   out: [T, heads * dim]
static void attention(const qrt_op *op, const qrt_ctx *c) {
    const qrt_state *st = c->state;
    const int64_t kv_heads = op->n[0], heads = op->in[0].heads, group = heads / kv_heads,
                  dim = op->in[0].dim;
    const buffers b = carve(c, group * qrt_attention_tile_rows((int)group), dim);
    const bool split = is_split(op, c);
    const int64_t pieces = longest(c), share = split ? pieces : 1; // units of a tile and kv head
    tile t;
    for (;;) {
        int64_t unit = qrt_take(c);
        if (!tile_at(op, c, unit / (kv_heads * share), &t)) return;
        t.kv_head = (int)(unit / share % kv_heads);
        int64_t piece = split ? unit % share : 0, end = pieces_of(st, t.start + t.rows);
        if (piece >= end) continue;
        load_queries(op, &t, &b);
        if (split) {
            attend(op, st, &t, &b, piece);
            for (int i = 0; i < t.queries; i++) {
                float *to = partial(c, heads, t.row + i / group, t.kv_head * group + i % group,
                                    piece, pieces, b.ld);
                memcpy(to, b.sum + i * b.ld, (size_t)b.ld * sizeof(float));
                to[b.ld] = b.top[i], to[b.ld + 1] = b.total[i];
            }
            continue;
        }
        memset(b.joined, 0, (size_t)(t.queries * b.ld) * sizeof(float));
        for (int i = 0; i < t.queries; i++) b.joined_top[i] = NEVER, b.joined_total[i] = 0;
        for (; piece < end; piece++) {
            attend(op, st, &t, &b, piece);
            for (int i = 0; i < t.queries; i++) {
                if (b.total[i] == 0) continue; // the row sees nothing of this piece
                join(b.joined + i * b.ld, b.joined_top + i, b.joined_total + i, b.sum + i * b.ld,
                     b.top[i], b.total[i], b.ld);
            }
        }
        for (int i = 0; i < t.queries; i++) {
            float *to = op->out.ptr + (t.row + i / group) * op->out.ld +
                        (t.kv_head * group + i % group) * dim;
            finish(to, b.joined + i * b.ld, b.joined_total[i], dim);
        }
    }
}

// Joins the pieces of a split step; otherwise attention has done everything.
static void attention_merge(const qrt_op *op, const qrt_ctx *c) {
    if (!is_split(op, c)) return;
    const qrt_batch *batch = c->batch;
    const int64_t heads = op->in[0].heads, dim = op->in[0].dim, ld = qrt_padded(dim),
                  pieces = longest(c);
    float *joined = (float *)(void *)c->scratch;
    int64_t lo, hi;
    qrt_share(c, batch->n_rows * heads, &lo, &hi);
    for (int64_t unit = lo; unit < hi; unit++) {
        int64_t r = unit / heads, h = unit % heads;
        int s = 0;
        while (batch->row_offsets[s + 1] <= r) s++;
        int64_t own = pieces_of(c->state, batch->starts[s] + r - batch->row_offsets[s] + 1);
        float top = NEVER, total = 0;
        memset(joined, 0, (size_t)ld * sizeof(float));
        for (int64_t p = 0; p < own; p++) {
            const float *from = partial(c, heads, r, h, p, pieces, ld);
            join(joined, &top, &total, from, from[ld], from[ld + 1], ld);
        }
        finish(op->out.ptr + r * op->out.ld + h * dim, joined, total, dim);
    }
}

void QRT_FILL(attention)(qrt_kernels *k);
void QRT_FILL(attention)(qrt_kernels *k) {
    k->op[QRT_ATTENTION] = attention;
    k->op[QRT_ATTENTION_MERGE] = attention_merge;
}

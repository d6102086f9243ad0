// linear, moe_linear, moe_sum, quantize. Quantised weights: a panel of NR rows is unpacked once,
// 256 columns at a time, and meets all x rows of the call; few x rows meet the blocks of common
// formats as they lie (direct.c). Float weights: dot products along the columns. The result of a
// row depends on its own x alone: not on the other rows, the cut into pieces or the thread.
#include "float_mul.h"
#include "panel_mul.h"
#include "quantize.h"
#include "scratch.h"

// Weight rows handed to a thread at a time: few enough that nobody waits long for the last, many
// enough that with few x rows the streams of memory (row_set, direct.c) are long.
static int64_t piece_rows(int64_t rows, int64_t n, int threads) {
    const int64_t share = rows / (threads * (n <= QRT_FEW_X ? 4 : 8)) / 64 * 64;
    return share < 64 ? 64 : share > 512 ? 512 : share;
}

typedef void (*product_fn)(const product *, int64_t row0, int64_t rows, uint8_t *scratch);

// One function for each kind of panel and each format's packing: products share them.
typedef void (*mul_fn)(panel *, int nb, const qrt_quant *, const int32_t *xs, const int32_t *starts,
                       int64_t i, int64_t end, int64_t first_block, float *acc);
#define MUL(BITS, GROUP, OFF)                                                                      \
    static __attribute__((noinline)) void mul_##BITS##_##GROUP##_##OFF(                            \
        panel *p, int nb, const qrt_quant *x, const int32_t *xs, const int32_t *starts, int64_t i, \
        int64_t end, int64_t first, float *acc) {                                                  \
        mul_panel(BITS, GROUP, OFF, p, nb, x, xs, starts, i, end, first, acc);                     \
    }
MUL(4, 32, 0)
MUL(4, 32, 1)
MUL(4, 32, 8)
MUL(4, 16, 0)
MUL(4, 16, 4)
MUL(5, 32, 0)
MUL(5, 32, 16)
MUL(6, 16, 32)
MUL(8, 32, 0)
MUL(8, 16, 0)

typedef void (*pack_fn)(const uint8_t *rows, int64_t row_bytes, int n_rows, int64_t first_block32,
                        int nb, panel *);
#define X(NAME, name, ...)                                                                         \
    static void packed_##name(const uint8_t *rows, int64_t row_bytes, int n_rows,                  \
                              int64_t first_block32, int nb, panel *p) {                           \
        panel_pack_##name(rows, row_bytes, n_rows, first_block32, nb, p);                          \
    }
QRT_QUANT_FORMATS(X)
#undef X

// Results of the last columns are stored after so many x rows, while the products of the next ones
// are made; a multiple of the tiles.
#define STORED 12
// Their places, which no cache holds by now, are fetched before these products.
INLINE void fetch_results(const product *p, int64_t i, int64_t end, int64_t row) {
    for (; i < end; i++) {
        const int64_t at = p->out_rows[i] * p->ld + row;
        for (int64_t r = 0; r < NR; r += 16) {
            __builtin_prefetch(p->out + at + r, 1, 3);
            if (p->residual) __builtin_prefetch(p->residual + at + r, 0, 3);
        }
    }
}

// n_rows weight rows from r on; what is packed next lies behind them.
INLINE void product_panel(const product *p, int64_t r, int n_rows, float *acc, pack_fn pack,
                          mul_fn mul) {
    _Alignas(64) uint8_t q[PARTS(8) * 256 * NR];
    _Alignas(64) float s[16 * NR], m[16 * NR];
    panel to = {q, s, m, NULL, NULL};
    const int64_t blocks = p->w->cols / 32, bytes = p->w->row_bytes;
    const uint8_t *from = p->data + r * bytes;
    for (int64_t b = 0; b < blocks; b += 8) {
        const int nb = (int)(blocks - b < 8 ? blocks - b : 8);
        const bool last = b + nb == blocks;
        pack(from, bytes, n_rows, b, nb, &to);
        for (int64_t i = 0, end; i < p->n; i = end) {
            end = !last || p->n - i < STORED ? p->n : i + STORED;
            const int64_t at = (blocks + b) * p->n, all = blocks * p->n;
            to.ahead = from + NR * bytes * (at + nb * i) / all;
            to.ahead_end = from + NR * bytes * (at + nb * end) / all;
            if (last) fetch_results(p, i, end, r);
            mul(&to, nb, p->x, p->x_rows, p->starts, i, end, b, acc);
            if (last)
                for (int64_t j = i; j < end; j++) store_row(p, j, r, acc + j * NR, n_rows);
        }
    }
}

static void product_quant(const product *p, int64_t row0, int64_t rows, uint8_t *scratch,
                          pack_fn pack, mul_fn mul) {
    for (int64_t r = 0; r < rows; r += NR)
        product_panel(p, row0 + r, (int)(rows - r < NR ? rows - r : NR), (float *)scratch, pack,
                      mul);
}
#define X(NAME, name, id, block, bytes, BITS, GROUP, OFF)                                          \
    static void product_##name(const product *p, int64_t row0, int64_t rows, uint8_t *scratch) {   \
        product_quant(p, row0, rows, scratch, packed_##name, mul_##BITS##_##GROUP##_##OFF);        \
    }
QRT_QUANT_FORMATS(X)
#undef X

// Rows of floats are worked on in sets. With few x rows, a set is one row from each of as many
// equal parts of the piece: long streams of memory side by side, which the processor's prefetchers
// follow. Else, and where the parts end, a set's rows are adjacent.
typedef struct {
    int64_t first, apart;
    int n; // 0: there are no more
} row_set;

INLINE int64_t spread_sets(const product *p, int64_t rows) {
    return p->n <= QRT_FEW_X ? rows / FSET : 0;
}
INLINE row_set set_of(int64_t i, int64_t spread, int64_t rows) {
    if (i < spread) return (row_set){i, spread, FSET};
    const int64_t first = i * FSET, left = rows - first;
    return (row_set){first, 1, (int)(left < 0 ? 0 : left < FSET ? left : FSET)};
}

// scratch: pointers to the x rows, their sums, widened weights, results, x rows in bfloat16
INLINE void product_float(const int format, const product *p, int64_t row0, int64_t rows,
                          uint8_t *scratch) {
    const void **x = (const void **)scratch;
    float *sums = (float *)(scratch + QRT_X_ROWS * sizeof *x), *wide = sums + p->n * FSET * QF;
    float *y = wide + FSET * QRT_WIDE;
    for (int64_t i = 0; i < p->n; i++) x[i] = p->xf + p->x_rows[i] * p->x_ld;
    if (IN_PAIRS(format)) round_rows(x, p->n, p->w->cols, y + p->n * FSET);
    const int64_t spread = spread_sets(p, rows);
    row_set set;
    for (int64_t i = 0; set = set_of(i, spread, rows), set.n; i++) {
        const uint8_t *w[FSET];
        for (int j = 0; j < FSET; j++)
            w[j] = p->data + (row0 + set.first + (j < set.n ? j * set.apart : 0)) * p->w->row_bytes;
        mul_float(format, w, x, p->n, p->w->cols, sums, wide, y);
        for (int64_t t = 0; t < p->n; t++)
            store_rows(p, t, row0 + set.first, set.apart, y + t * FSET, set.n);
    }
}
#define X(NAME, name, ...)                                                                         \
    static void product_##name(const product *p, int64_t row0, int64_t rows, uint8_t *scratch) {   \
        product_float(QRT_##NAME, p, row0, rows, scratch);                                         \
    }
QRT_FLOAT_FORMATS(X)
#undef X

static const product_fn products[QRT_N_FORMATS] = {
#define X(NAME, name, ...) [QRT_##NAME] = product_##name,
    QRT_FLOAT_FORMATS(X) QRT_QUANT_FORMATS(X)
#undef X
};

static const struct {
    int group, taken;
} kinds[QRT_N_FORMATS] = {
#define X(NAME, name, id, block, bytes, BITS, GROUP, OFF) [QRT_##NAME] = {GROUP, TAKEN(BITS, OFF)},
    QRT_QUANT_FORMATS(X)
#undef X
};

// What is taken off weights is whole numbers times the sums of x, where sums of products begin:
// once for all rows of weights. -> scratch behind them
static uint8_t *set_starts(product *p, uint8_t *scratch) {
    const int group = kinds[p->w->format].group, taken = kinds[p->w->format].taken;
    int32_t *starts = (int32_t *)scratch;
    p->starts = starts; // in any case, as addresses are computed from it
    if (!taken) return scratch;
    const int32_t *sums = group == 32 ? p->x->n32 : p->x->n16;
    const int64_t each = p->w->cols / group;
    for (int64_t i = 0; i < p->n; i++, starts += each) {
        const int32_t *of = sums + p->x_rows[i] * each;
        int64_t g = 0;
        for (; g + QF <= each; g += QF) {
            wv w;
            memcpy(&w, of + g, sizeof w);
            wv_store((uint8_t *)(starts + g), w * (uint32_t)-taken);
        }
        for (; g < each; g++) starts[g] = -taken * of[g];
    }
    return scratch + ((p->n * each * 4 + 63) & ~(int64_t)63);
}

static void multiply(const qrt_kernels *k, product *p, int64_t row0, int64_t rows,
                     uint8_t *scratch) {
    scratch = set_starts(p, scratch);
    const int64_t done = p->n <= QRT_DIRECT_X && k->direct ? k->direct(p, row0, rows) : 0;
    if (done < rows) products[p->w->format](p, row0 + done, rows - done, scratch);
}

// ---------------------------------------------------------------- ops
// x rows of a piece: of as few pieces as can be, all of about the same length, as a few rows left
// over would cost the unpacking of all weights.
static int64_t x_block(const qrt_tensor *w, int64_t n) {
    const bool floats = w->format <= QRT_BF16;
    const int64_t tile = floats ? FTILE : TILE, most = qrt_x_rows(w->cols, floats ? 4 : 1);
    const int64_t pieces = (n + most - 1) / most;
    return pieces <= 1 ? n : ((n + pieces - 1) / pieces + tile - 1) / tile * tile;
}

// scratch: [identity rows] then the product's own
static void op_linear(const qrt_op *op, const qrt_ctx *c) {
    const int64_t n = qrt_rows(op, c);
    int32_t *identity = (int32_t *)c->scratch;
    for (int64_t i = 0; i < n; i++) identity[i] = (int32_t)i;
    uint8_t *own = c->scratch + ((n * 4 + 63) & ~(int64_t)63);
    int64_t first = 0;
    int64_t piece = qrt_take(c);
    for (int i = 0; i < op->n_parts; i++) {
        const qrt_part *part = &op->parts[i];
        const qrt_tensor *w = &part->w;
        const int64_t step = x_block(w, n), rows_each = piece_rows(w->rows, n, c->threads);
        const int64_t row_pieces = (w->rows + rows_each - 1) / rows_each;
        const int64_t pieces = row_pieces * (step ? (n + step - 1) / step : 0);
        for (; piece < first + pieces; piece = qrt_take(c)) {
            const int64_t x0 = (piece - first) / row_pieces * step,
                          r0 = (piece - first) % row_pieces * rows_each;
            product p = {.w = w,
                         .data = w->data,
                         .scale = w->scale ? w->scale[0] : 1,
                         .x = &op->quant,
                         .xf = op->in[0].ptr,
                         .x_ld = op->in[0].ld,
                         .x_rows = identity + x0,
                         .out_rows = identity + x0,
                         .n = n - x0 < step ? n - x0 : step,
                         .out = part->out.ptr,
                         .ld = part->out.ld,
                         .residual = part->residual};
            multiply(c->kernels, &p, r0, w->rows - r0 < rows_each ? w->rows - r0 : rows_each, own);
        }
        first += pieces;
    }
}

// n[0]: experts used by a row; n[1]: 1 if x has a row for each chosen expert, 0 if they share the
// row. scratch: counts [experts + 1], order [T * used], x rows [T * used], then the product's own
static void op_moe_linear(const qrt_op *op, const qrt_ctx *c) {
    const int64_t used = op->n[0], entries = qrt_rows(op, c) * used,
                  experts = op->parts[0].w.experts;
    int32_t *start = (int32_t *)c->scratch, *order = start + experts + 1, *x_rows = order + entries;
    uint8_t *own = c->scratch + (((experts + 1 + 2 * entries) * 4 + 63) & ~(int64_t)63);
    const qrt_view *route = &op->in[1];
    // Entries grouped by expert: counting sort, in order of rows.
    memset(start, 0, (size_t)(experts + 1) * sizeof *start);
    for (int64_t e = 0; e < entries; e++)
        start[(int64_t)route->ptr[e / used * route->ld + e % used] + 1]++;
    for (int64_t e = 0; e < experts; e++) start[e + 1] += start[e];
    for (int64_t e = 0; e < entries; e++) {
        int32_t *at = &start[(int64_t)route->ptr[e / used * route->ld + e % used]];
        order[*at] = (int32_t)e;
        x_rows[(*at)++] = (int32_t)(op->n[1] ? e : e / used);
    }
    int64_t first = 0, piece = qrt_take(c);
    for (int i = 0; i < op->n_parts; i++) {
        const qrt_part *part = &op->parts[i];
        const qrt_tensor *w = &part->w;
        const int64_t rows_each = piece_rows(w->rows, entries / experts, c->threads);
        const int64_t row_pieces = (w->rows + rows_each - 1) / rows_each;
        for (int64_t e = 0, lo = 0; e < experts; e++) { // start[e] is the end of e's entries by now
            const int64_t hi = start[e];
            if (hi == lo) continue;
            const int64_t step = x_block(w, hi - lo);
            const int64_t pieces = row_pieces * ((hi - lo + step - 1) / step);
            for (; piece < first + pieces; piece = qrt_take(c)) {
                const int64_t x0 = lo + (piece - first) / row_pieces * step;
                const int64_t r0 = (piece - first) % row_pieces * rows_each;
                product p = {.w = w,
                             .data = w->data + e * w->expert_bytes,
                             .scale = w->scale ? w->scale[e] : 1,
                             .x = &op->quant,
                             .xf = op->in[0].ptr,
                             .x_ld = op->n[1] ? w->cols : op->in[0].ld,
                             .x_rows = x_rows + x0,
                             .out_rows = order + x0,
                             .n = hi - x0 < step ? hi - x0 : step,
                             .out = part->out.ptr,
                             .ld = w->rows};
                multiply(c->kernels, &p, r0, w->rows - r0 < rows_each ? w->rows - r0 : rows_each,
                         own);
            }
            first += pieces;
            lo = hi;
        }
    }
}

// out = sum over the chosen experts, in list order, of weight * in[0]'s piece; in[0]: [T, used *
// width].
static void op_moe_sum(const qrt_op *op, const qrt_ctx *c) {
    const int64_t used = op->n[0], width = op->out.dim;
    int64_t lo, hi;
    qrt_share(c, qrt_rows(op, c), &lo, &hi);
    for (int64_t t = lo; t < hi; t++) {
        const float *y = op->in[0].ptr + t * op->in[0].ld;
        const float *weight = op->in[1].ptr + t * op->in[1].ld + used;
        float *out = op->out.ptr + t * op->out.ld;
        for (int64_t i = 0; i < width; i++) out[i] = weight[0] * y[i];
        for (int64_t j = 1; j < used; j++)
            for (int64_t i = 0; i < width; i++) out[i] += weight[j] * y[j * width + i];
    }
}

static void op_quantize(const qrt_op *op, const qrt_ctx *c) {
    const int64_t blocks = op->quant.cols / 32, per_row = op->in[0].dim / op->quant.cols * blocks;
    int64_t lo, hi;
    qrt_share(c, qrt_rows(op, c) * per_row, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        const float *x = op->in[0].ptr + i / per_row * op->in[0].ld + i % per_row * 32;
        quantize_block32(x, &op->quant, i / blocks, i % blocks);
    }
}

// Independent chains of the level's int8 multiply-add, as in dot_group without its loads.
#define CHAINS 12
#define EACH_CHAIN _Pragma("GCC unroll 12") for (int j = 0; j < CHAINS; j++)
static double int8_peak(void) {
    enum { N = 200000 };
    _Alignas(64) uint8_t zero[64] = {0};
    __asm__ volatile("" : : "r"(zero) : "memory");
#if (defined(QRT_LEVEL_AVX512) || defined(QRT_LEVEL_AVX512BF16)) && !defined(QRT_SIMDE)
    __m512i a[CHAINS], w = _mm512_loadu_si512(zero), b = w;
    EACH_CHAIN a[j] = w;
    for (int i = 0; i < N; i++) EACH_CHAIN {
            a[j] = _mm512_dpbusd_epi32(a[j], w, b);
            __asm__ volatile("" : "+v"(a[j]));
        }
    return 128.0 * N * CHAINS;
#elif defined(QRT_LEVEL_AVX2)
    __m256i a[CHAINS], w = _mm256_loadu_si256((const __m256i *)zero), b = w;
    EACH_CHAIN a[j] = w;
    for (int i = 0; i < N; i++) EACH_CHAIN {
            HOLD(w); // else the product is made once, before the loop
            a[j] = _mm256_add_epi16(a[j], _mm256_maddubs_epi16(w, b));
            HOLD(a[j]);
        }
    return 64.0 * N * CHAINS;
#elif defined(QRT_LEVEL_NEON)
    int32x4_t a[CHAINS];
    int8x16_t w = vld1q_s8((const int8_t *)zero);
    EACH_CHAIN a[j] = vdupq_n_s32(0);
    for (int i = 0; i < N; i++) EACH_CHAIN {
            a[j] = vdotq_s32(a[j], w, w);
            __asm__ volatile("" : "+w"(a[j]));
        }
    return 32.0 * N * CHAINS;
#else
    int32_t a = 0;
    for (int i = 0; i < N; i++) {
        a += (int8_t)zero[i & 63] * (int8_t)zero[(i + 1) & 63];
        __asm__ volatile("" : "+r"(a));
    }
    return 2.0 * N;
#endif
}
#undef CHAINS
#undef EACH_CHAIN

void QRT_FILL(linear)(qrt_kernels *k) {
    k->int8_peak = int8_peak;
    k->op[QRT_LINEAR] = op_linear;
    k->op[QRT_MOE_LINEAR] = op_moe_linear;
    k->op[QRT_MOE_SUM] = op_moe_sum;
    k->op[QRT_QUANTIZE] = op_quantize;
}

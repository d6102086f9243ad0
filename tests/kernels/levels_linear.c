// Level driver: dequantize, quantize, and products of every weight format with rows.
#include "levels.h"

typedef struct {
    const char *name;
    int id, elements, bytes;
} format;
static const format formats[] = {
#define X(NAME, name, id, elements, bytes, ...) {#NAME, QRT_##NAME, elements, bytes},
    QRT_FLOAT_FORMATS(X) QRT_QUANT_FORMATS(X)
#undef X
};

// Scales of about 0.01 and of both signs, as float16 or bfloat16 would hold them.
static uint16_t small_half(void) {
    return (uint16_t)((uniform() < 0 ? 0x8000 : 0) | 0x2000 | (int)(fabs(uniform()) * 0x3ff));
}
static void put_half(uint8_t *at) {
    const uint16_t h = small_half();
    memcpy(at, &h, 2);
}

// Any bytes are a legal block but for its scales, which must be finite.
static void limit_scales(int id, uint8_t *block) {
    switch (id) {
    case QRT_Q4_1:
    case QRT_Q5_1:
    case QRT_Q4_K:
    case QRT_Q5_K: put_half(block), put_half(block + 2); break;
    case QRT_Q2_K: put_half(block + 80), put_half(block + 82); break;
    case QRT_Q3_K: put_half(block + 108); break;
    case QRT_Q6_K: put_half(block + 208); break;
    case QRT_TQ1_0: put_half(block + 52); break;
    case QRT_TQ2_0: put_half(block + 64); break;
    case QRT_MXFP4: block[0] = (uint8_t)(118 + (block[0] & 7)); break;
    case QRT_NVFP4:
        for (int i = 0; i < 4; i++) block[i] &= 0x3f;
        break;
    case QRT_IQ1_M: { // its scale is spread over the upper four bits of four words
        const uint16_t h = small_half();
        for (int i = 0; i < 4; i++)
            block[49 + 2 * i] = (uint8_t)((block[49 + 2 * i] & 15) | (h >> 4 * i & 15) << 4);
        break;
    }
    default: put_half(block);
    }
}

static uint8_t *random_weights(const format *f, int64_t numbers) {
    const int64_t blocks = numbers / f->elements;
    if (f->id == QRT_F32) return (uint8_t *)random_floats(numbers, 0.1);
    uint8_t *data = take(blocks * f->bytes);
    for (int64_t i = 0; i < blocks * f->bytes; i++)
        data[i] = (uint8_t)(int)((uniform() + 1) * 127.99);
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t *block = data + b * f->bytes;
        if (f->id == QRT_BF16) {
            const uint16_t h = (uint16_t)(0x3c00 | (uniform() < 0 ? 0x8000 : 0) | block[0]);
            memcpy(block, &h, 2);
        } else {
            limit_scales(f->id, block);
        }
    }
    return data;
}

static qrt_tensor random_tensor(const format *f, int experts, int rows, int cols) {
    const int64_t row_bytes = (int64_t)cols / f->elements * f->bytes;
    return (qrt_tensor){.data = random_weights(f, (int64_t)experts * rows * cols),
                        .format = f->id,
                        .experts = experts,
                        .rows = rows,
                        .cols = cols,
                        .row_bytes = row_bytes,
                        .expert_bytes = rows * row_bytes};
}

static void dequantize(const format *f, int n) {
    name_case("dequantize %s, %d", f->name, n);
    const uint8_t *data = random_weights(f, n);
    float *a = unset_floats(n), *b = unset_floats(n);
    level.dequantize[f->id](data, a, n);
    base.dequantize[f->id](data, b, n);
    check_same("out", a, b, 4 * n);
    for (int i = 0; i < n; i++) check("random weight", fabsf(b[i]) < 1e3f);
    release_all();
}

// x [rows, cols], and quantised as an op would
typedef struct {
    float *x;
    qrt_quant quant;
    double *seen; // what the product has to work with
} input;

// To the nearest bfloat16, even where two are as near.
static float bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    u = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &u, 4);
    return x;
}

static input random_input(const format *f, int rows, int cols) {
    input in = {.x = random_floats((int64_t)rows * cols, 1), .seen = doubles((int64_t)rows * cols)};
    const bool rounded = f->id == QRT_BF16 && rounds_x;
    for (int64_t i = 0; i < (int64_t)rows * cols; i++)
        in.seen[i] = rounded ? bf16(in.x[i]) : in.x[i];
    if (f->elements == 1) return in;
    in.quant = quant_of(rows, cols);
    qrt_op op = {.kind = QRT_QUANTIZE, .in = {rows_of(in.x, cols)}, .quant = in.quant};
    qrt_batch batch = {.n_rows = rows};
    run_op(&op, &batch, NULL, 2);
    check_quant(&in.quant, in.x, rows);
    for (int64_t i = 0; i < (int64_t)rows * cols; i++)
        in.seen[i] = (double)in.quant.d[i / 32] * in.quant.q[i];
    return in;
}

// A product in double: x [rows, cols] -> out [rows, w->rows]
static void multiply(const qrt_tensor *w, int expert, const double *x, int rows, double scale,
                     double *out) {
    float *row = malloc(sizeof(float) * (size_t)w->cols);
    for (int64_t r = 0; r < w->rows; r++) {
        base.dequantize[w->format](w->data + expert * w->expert_bytes + r * w->row_bytes, row,
                                   w->cols);
        for (int t = 0; t < rows; t++) {
            double sum = 0;
            for (int64_t c = 0; c < w->cols; c++) sum += x[t * w->cols + c] * row[c];
            out[t * w->rows + r] = sum * scale;
        }
    }
    free(row);
}

static void linear(const format *f, int out_rows, int cols, int rows) {
    enum { SECOND = 3 }; // rows of another part of the same op
    static const float scale = 0.75f;
    name_case("linear %s, %d x %d, %d rows", f->name, out_rows, cols, rows);
    const input in = random_input(f, rows, cols);
    float *out = unset_floats((int64_t)rows * out_rows), *second = unset_floats(rows * SECOND);
    float *single = unset_floats(out_rows), *residual = random_floats((int64_t)rows * out_rows, 1);
    double *want = doubles((int64_t)rows * out_rows), *want_second = doubles(rows * SECOND);
    qrt_part parts[2] = {{.w = random_tensor(f, 1, out_rows, cols),
                          .out = rows_of(out, out_rows),
                          .residual = residual},
                         {.w = random_tensor(f, 1, SECOND, cols), .out = rows_of(second, SECOND)}};
    parts[1].w.scale = &scale;
    multiply(&parts[0].w, 0, in.seen, rows, 1, want);
    multiply(&parts[1].w, 0, in.seen, rows, scale, want_second);
    for (int i = 0; i < rows * out_rows; i++) want[i] += residual[i];
    qrt_op op = {.kind = QRT_LINEAR,
                 .in = {rows_of(in.x, cols)},
                 .parts = parts,
                 .n_parts = 2,
                 .quant = in.quant};
    qrt_batch batch = {.n_rows = rows};
    run_op(&op, &batch, NULL, 1 + rows % 3);
    check_near("out", out, want, (int64_t)rows * out_rows, 1e-5);
    check_near("second part", second, want_second, rows * SECOND, 1e-5);
    // A row alone has the same result as among others.
    const int t = rows - 1;
    op.n_parts = 1;
    op.in[0].ptr += (int64_t)t * cols;
    parts[0].out.ptr = single;
    parts[0].residual = residual + (int64_t)t * out_rows;
    if (op.quant.q) {
        op.quant.q += (int64_t)t * cols;
        op.quant.d += t * cols / 32, op.quant.s32 += t * cols / 32, op.quant.s16 += t * cols / 16;
        op.quant.n32 += t * cols / 32, op.quant.n16 += t * cols / 16;
    }
    batch.n_rows = 1;
    run_op(&op, &batch, NULL, 1);
    check_same("row alone", single, out + (int64_t)t * out_rows, 4 * out_rows);
    release_all();
}

// Chosen experts of each row: x is shared by a row's experts, or (own) each has its own. Then their
// weighted sum.
static void experts(const format *f, int out_rows, int cols, int rows, bool own) {
    enum { EXPERTS = 5, USED = 3 };
    name_case("moe_linear %s, %d x %d, %d rows%s", f->name, out_rows, cols, rows,
              own ? ", own x" : "");
    const int per_row = own ? USED : 1, entries = rows * USED;
    const input in = random_input(f, rows * per_row, cols);
    float *route = random_floats(2 * entries, 1), *scales = random_floats(EXPERTS, 1);
    float *out = unset_floats((int64_t)entries * out_rows),
          *sum = unset_floats((int64_t)rows * out_rows);
    double *want = doubles((int64_t)entries * out_rows),
           *want_sum = doubles((int64_t)rows * out_rows);
    qrt_part part = {.w = random_tensor(f, EXPERTS, out_rows, cols),
                     .out = rows_of(out, USED * out_rows)};
    part.w.scale = scales;
    memset(want_sum, 0, sizeof(double) * (size_t)(rows * out_rows));
    for (int e = 0; e < entries; e++) { // expert 2 is never chosen
        const int t = e / USED, u = e % USED, expert = (int[]){0, 1, 3, 4}[(t * 7 + u) % 4];
        route[t * 2 * USED + u] = (float)expert;
        multiply(&part.w, expert, in.seen + (int64_t)(own ? e : t) * cols, 1, scales[expert],
                 want + (int64_t)e * out_rows);
        for (int r = 0; r < out_rows; r++)
            want_sum[t * out_rows + r] +=
                route[t * 2 * USED + USED + u] * want[(int64_t)e * out_rows + r];
    }
    qrt_op op = {.kind = QRT_MOE_LINEAR,
                 .n = {USED, own},
                 .in = {rows_of(in.x, per_row * cols), rows_of(route, 2 * USED)},
                 .parts = &part,
                 .n_parts = 1,
                 .quant = in.quant};
    qrt_batch batch = {.n_rows = rows};
    run_op(&op, &batch, NULL, 1 + rows % 3);
    check_near("out", out, want, (int64_t)entries * out_rows, 1e-5);
    qrt_op add = {.kind = QRT_MOE_SUM,
                  .n = {USED},
                  .in = {rows_of(out, USED * out_rows), rows_of(route, 2 * USED)},
                  .out = rows_of(sum, out_rows)};
    run_op(&add, &batch, NULL, 2);
    check_near("sum", sum, want_sum, (int64_t)rows * out_rows, 1e-5);
    release_all();
}

void test_linear(void) {
    for (int i = 0; i < (int)(sizeof formats / sizeof *formats); i++) {
        const format *f = &formats[i];
        const bool plain = f->elements == 1;
        const int chunk = f->elements == 256 ? 256 : 32 * (f->elements / 32 ? f->elements / 32 : 1);
        const int cols = plain                ? 83
                         : f->elements == 256 ? 512
                                              : chunk * 11; // a chunk of 256 and a part of one
        dequantize(f, plain ? 35 : chunk * 3);
        linear(f, 70, cols, 17);
        linear(f, 1, plain ? 16 : chunk, 1);
        // Every remainder of the tiles of x rows, with panels of one to all rows.
        for (int rows = 2; rows < 17; rows++)
            linear(f, 3 * rows - 2, plain ? 10 + rows : chunk, rows);
        // Few x rows, which some levels multiply without a panel: sets of far rows, and the rest.
        for (int rows = 2; rows < 6; rows++) linear(f, 69, cols, rows);
        experts(f, 37, plain ? 45 : chunk, 6, false);
        experts(f, 16, chunk, 3, true);
    }
    for (int i = 0; formats[i].elements == 1; i++) {
        linear(&formats[i], 9, 1100, 7); // more columns than a tile takes at once
        for (int rows = 6; rows < 14; rows += 7) linear(&formats[i], 11, 97, rows);
    }
}

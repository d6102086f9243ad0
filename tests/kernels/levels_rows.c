// Level driver: ops that work row by row, and the convolution.
#include "levels.h"

#define ROUNDING 5e-7

typedef struct {
    int rows, heads, dim;
} shape;
static const shape shapes[] = {{1, 1, 4096}, {3, 1, 100}, {5, 4, 16},  {2, 3, 64},
                               {7, 16, 128}, {1, 32, 33}, {17, 2, 33}, {4, 2, 256}};
#define N_SHAPES (int)(sizeof shapes / sizeof *shapes)

// One value of an op with inputs a and b; root: of the mean square, or for l2_norm of the sum of
// squares.
static double expected(int kind, double a, double b, double root, double weight) {
    switch (kind) {
    case QRT_RMS_NORM: return a / root * weight;
    case QRT_GATED_RMS_NORM: return a / root * weight * b * sigmoid(b);
    case QRT_L2_NORM: return a / root * 0.25;
    case QRT_SILU_MUL: return a * sigmoid(a) * b;
    case QRT_SIGMOID_MUL: return a * sigmoid(b);
    default: return a + b;
    }
}

// Heads lie apart with gaps between them; narrow: one gate for a whole row.
static void elementwise(int kind, shape s, bool narrow, int threads) {
    const int width = s.heads * s.dim, stride = 2 * s.dim, ld = s.heads * stride + 5;
    const bool norm = kind == QRT_RMS_NORM || kind == QRT_GATED_RMS_NORM || kind == QRT_L2_NORM;
    name_case("op %d, %d x %d x %d%s, %d threads", kind, s.rows, s.heads, s.dim,
              narrow ? ", narrow" : "", threads);
    float *x = random_floats((int64_t)s.rows * ld, norm ? 1 : 3),
          *z = random_floats((int64_t)s.rows * ld, 3);
    float *weight = random_floats(s.dim, 1), *out = unset_floats((int64_t)s.rows * width);
    double *want = doubles((int64_t)s.rows * width);
    for (int t = 0; t < s.rows; t++)
        for (int h = 0; h < s.heads; h++) {
            const float *a = x + t * ld + h * stride, *b = z + t * ld + h * stride;
            double squares = 0;
            for (int i = 0; i < s.dim; i++) squares += (double)a[i] * a[i];
            const double root = sqrt((kind == QRT_L2_NORM ? squares : squares / s.dim) + 1e-6);
            for (int i = 0; i < s.dim; i++)
                want[t * width + h * s.dim + i] =
                    expected(kind, a[i], narrow ? z[t * ld] : b[i], root, weight[i]);
        }
    qrt_op op = {.kind = kind,
                 .f = {kind == QRT_L2_NORM ? 0.25f : 1e-6f},
                 .vec = {weight},
                 .in = {view(x, ld, s.heads, s.dim, stride),
                        narrow ? view(z, ld, 1, 1, 1) : view(z, ld, s.heads, s.dim, stride)},
                 .out = rows_of(out, width)};
    if (width % 32 == 0 && kind != QRT_L2_NORM) op.quant = quant_of(s.rows, width);
    qrt_batch batch = {.n_rows = s.rows};
    run_op(&op, &batch, NULL, threads);
    check_near("out", out, want, (int64_t)s.rows * width, ROUNDING);
    if (op.quant.q) check_quant(&op.quant, out, s.rows);
    release_all();
}

static void tiny_values(void) { // blocks that are almost zero
    name_case("quantising tiny values");
    float x[64] = {[3] = 1e-40f, [40] = 1.01e-20f, [41] = -2e-20f}, out[64];
    qrt_op op = {.kind = QRT_ADD,
                 .in = {rows_of(x, 64), rows_of(x, 64)},
                 .out = rows_of(out, 64),
                 .quant = quant_of(1, 64)};
    qrt_batch batch = {.n_rows = 1};
    run_op(&op, &batch, NULL, 1);
    check("below the limit", op.quant.d[0] == 0 && op.quant.q[3] == 0);
    check("above the limit", op.quant.q[41] == -127 && op.quant.q[40] == 64);
    release_all();
}

static void gates(int heads) {
    enum { ROWS = 5 };
    name_case("delta_gates %d", heads);
    float *a = random_floats(ROWS * heads, 8), *b = random_floats(ROWS * heads, 3);
    float *bias = random_floats(heads, 1), *neg = random_floats(heads, 1),
          *out = unset_floats(2 * ROWS * heads);
    double *want = doubles(2 * ROWS * heads);
    for (int t = 0; t < ROWS; t++)
        for (int h = 0; h < heads; h++) {
            want[t * 2 * heads + h] = log1p(exp((double)a[t * heads + h] + bias[h])) * neg[h];
            want[t * 2 * heads + heads + h] = sigmoid(b[t * heads + h]);
        }
    qrt_op op = {.kind = QRT_DELTA_GATES,
                 .vec = {bias, neg},
                 .in = {rows_of(a, heads), rows_of(b, heads)},
                 .out = rows_of(out, 2 * heads)};
    qrt_batch batch = {.n_rows = ROWS};
    run_op(&op, &batch, NULL, 2);
    check_near("out", out, want, 2 * ROWS * heads, ROUNDING);
    release_all();
}

static void embed_and_gather(int threads) {
    enum { WIDTH = 77, TABLE = 10, ROWS = 4 };
    name_case("embed and gather_rows, %d threads", threads);
    float *table = random_floats(TABLE * WIDTH, 1), *out = unset_floats(ROWS * WIDTH),
          *chosen = unset_floats(2 * WIDTH);
    int32_t tokens[ROWS] = {3, 9, 0, 3}, wanted[2] = {3, 1};
    qrt_part part = {.w = {.data = (uint8_t *)table,
                           .format = QRT_F32,
                           .rows = TABLE,
                           .cols = WIDTH,
                           .row_bytes = 4 * WIDTH}};
    qrt_op embed = {.kind = QRT_EMBED, .parts = &part, .n_parts = 1, .out = rows_of(out, WIDTH)};
    qrt_batch batch = {.n_rows = ROWS, .n_out = 2, .tokens = tokens, .out_rows = wanted};
    run_op(&embed, &batch, NULL, threads);
    for (int t = 0; t < ROWS; t++)
        check_same("embed", out + t * WIDTH, table + tokens[t] * WIDTH, 4 * WIDTH);
    qrt_op gather = {.kind = QRT_GATHER_ROWS,
                     .gathered = 1,
                     .in = {rows_of(out, WIDTH)},
                     .out = rows_of(chosen, WIDTH)};
    run_op(&gather, &batch, NULL, threads);
    for (int i = 0; i < 2; i++)
        check_same("gather", chosen + i * WIDTH, out + wanted[i] * WIDTH, 4 * WIDTH);
    release_all();
}

static void rope(int heads, int dim, int rot, int section_h, int section_w, int rows) {
    const int half = rot / 2, ld = heads * dim + 3;
    float *x = random_floats((int64_t)rows * ld, 1),
          *out = unset_floats((int64_t)rows * heads * dim);
    double *want = doubles((int64_t)rows * heads * dim);
    int32_t *position = take(12 * rows);
    for (int i = 0; i < 3 * rows; i++)
        position[i] = i % 5 == 0 ? 262143 - i : i % 3 == 0 ? i : (int)(fabs(uniform()) * 262143);
    for (int t = 0; t < rows; t++)
        for (int h = 0; h < heads; h++) {
            const float *v = x + t * ld + h * dim;
            double *to = want + (t * heads + h) * dim;
            for (int i = 0; i < dim; i++) to[i] = v[i];
            for (int j = 0; j < half; j++) {
                const int axis = j % 3 == 1 && j < 3 * section_h   ? 1
                                 : j % 3 == 2 && j < 3 * section_w ? 2
                                                                   : 0;
                const double angle = position[axis * rows + t] * pow(1e7, -2.0 * j / rot);
                to[j] = v[j] * cos(angle) - v[j + half] * sin(angle);
                to[j + half] = v[j + half] * cos(angle) + v[j] * sin(angle);
            }
        }
    qrt_op op = {.kind = QRT_ROPE,
                 .f = {1e7f},
                 .n = {rot, section_h, section_w},
                 .in = {view(x, ld, heads, dim, dim)},
                 .out = rows_of(out, heads * dim)};
    qrt_batch batch = {.n_rows = rows, .positions = position};
    for (int threads = 1; threads <= 2; threads++) {
        name_case("rope %d x %d, rot %d, %d threads", heads, dim, rot, threads);
        run_op(&op, &batch, NULL, threads);
        check_near("out", out, want, (int64_t)rows * heads * dim, 1.2e-7);
    }
    release_all();
}

static void route(void) {
    enum { EXPERTS = 20, USED = 4, ROWS = 3 };
    float scores[ROWS * EXPERTS], out[ROWS * 2 * USED];
    for (int i = 0; i < ROWS * EXPERTS; i++) scores[i] = (float)(int)(uniform() * 5); // with ties
    qrt_op op = {.kind = QRT_MOE_ROUTE,
                 .n = {USED},
                 .in = {rows_of(scores, EXPERTS)},
                 .out = rows_of(out, 2 * USED)};
    qrt_batch batch = {.n_rows = ROWS};
    name_case("moe_route");
    run_op(&op, &batch, NULL, 2);
    for (int t = 0; t < ROWS; t++) {
        const float *s = scores + t * EXPERTS, *got = out + t * 2 * USED;
        bool used[EXPERTS] = {false};
        double weight[USED], sum = 0;
        for (int u = 0; u < USED; u++) {
            int best = -1;
            for (int e = 0; e < EXPERTS; e++)
                if (!used[e] && (best < 0 || s[e] > s[best])) best = e;
            used[best] = true;
            sum += weight[u] = exp(s[best]);
            check("expert", got[u] == (float)best);
        }
        for (int u = 0; u < USED; u++)
            check("weight", fabs(got[USED + u] - weight[u] / sum) < 1e-6);
    }
    for (int i = 0; i < ROWS * EXPERTS; i++) scores[i] = NAN;
    run_op(&op, &batch, NULL, 1);
    for (int u = 0; u < USED; u++) check("scores that are not numbers", out[u] == (float)u);
}

// Two sequences: rows 0..9 begin in slot 2, rows 10..22 go on from slot 1 in slot 0. Saved: the
// states after a row of each that reach into what came before the step, and after a last row. The
// first one again in pieces. Slots for saved states hold NaN beforehand.
static void conv(int channels, int taps) {
    enum { LAYERS = 2, ROWS = 23, SLOTS = 6, SAVES = 3 };
    const int64_t one = (int64_t)channels * (taps - 1), all = SLOTS * LAYERS * one,
                  used = 3 * LAYERS * one;
    int32_t offsets[3] = {0, 10, ROWS}, starts[2] = {0, 5}, slots[2] = {2, 0}, sources[2] = {2, 1};
    int32_t save_rows[SAVES] = {1, 9, 10}, save_slots[SAVES] = {5, 3, 4};
    float *x = random_floats(ROWS * channels, 1), *w = random_floats(channels * taps, 1),
          *before = memcpy(unset_floats(all), random_floats(used, 1), (size_t)(4 * used));
    float *out = unset_floats(ROWS * channels), *again = unset_floats(ROWS * channels);
    float *after = copy_of(before, 4 * all), *pieces = copy_of(before, 4 * all);
    double *want = doubles(ROWS * channels);
    name_case("conv1d_silu %d x %d", channels, taps);
    for (int s = 0; s < 2; s++)
        for (int t = offsets[s]; t < offsets[s + 1]; t++)
            for (int c = 0; c < channels; c++) {
                const float *old =
                    before + (sources[s] * LAYERS + 1) * one + (int64_t)c * (taps - 1);
                double sum = 0;
                for (int i = 0; i < taps; i++) {
                    const int at = t - offsets[s] - (taps - 1) + i;
                    const double value = at >= 0     ? x[(offsets[s] + at) * channels + c]
                                         : starts[s] ? old[at + taps - 1]
                                                     : 0;
                    sum += value * w[c * taps + i];
                }
                want[t * channels + c] = sum * sigmoid(sum);
            }
    qrt_state state = {
        .conv = after, .delta_layers = LAYERS, .channels = channels, .conv_kernel = taps};
    qrt_batch batch = {.n_rows = ROWS,
                       .n_seqs = 2,
                       .n_saves = SAVES,
                       .row_offsets = offsets,
                       .starts = starts,
                       .slots = slots,
                       .sources = sources,
                       .save_rows = save_rows,
                       .save_slots = save_slots};
    qrt_op op = {.kind = QRT_CONV1D_SILU,
                 .layer = 1,
                 .vec = {w},
                 .in = {rows_of(x, channels)},
                 .out = rows_of(out, channels)};
    run_op(&op, &batch, &state, 2);
    check_near("out", out, want, ROWS * channels, ROUNDING);
    bool right = true;
    for (int s = 0; s < 2; s++)
        for (int c = 0; c < channels; c++)
            for (int i = 0; i < taps - 1; i++)
                right =
                    right && after[(slots[s] * LAYERS + 1) * one + (int64_t)c * (taps - 1) + i] ==
                                 x[(offsets[s + 1] - taps + 1 + i) * channels + c];
    check("state", right);
    for (int s = 0; s < SLOTS; s++)
        check_same("state of another layer", after + 2 * s * one, before + 2 * s * one, 4 * one);
    check_same("state of another slot", after + 2 * one, before + 2 * one, 4 * 2 * one);
    right = true;
    for (int k = 0; k < SAVES; k++) {
        const int s = save_rows[k] >= offsets[1];
        for (int c = 0; c < channels; c++)
            for (int i = 0; i < taps - 1; i++) {
                const int at = save_rows[k] - offsets[s] - (taps - 2) + i;
                const float *old =
                    before + (sources[s] * LAYERS + 1) * one + (int64_t)c * (taps - 1);
                const float value = at >= 0     ? x[(offsets[s] + at) * channels + c]
                                    : starts[s] ? old[at + taps - 1]
                                                : 0;
                right = right &&
                        after[(save_slots[k] * LAYERS + 1) * one + (int64_t)c * (taps - 1) + i] ==
                            value;
            }
    }
    check("saved state", right);
    const int cuts[] = {0, 1, 2, 4, 10};
    state.conv = pieces;
    for (int k = 0; k < 4; k++) {
        int32_t piece[2] = {0, cuts[k + 1] - cuts[k]}, start[1] = {cuts[k]};
        qrt_batch part = {.n_rows = piece[1],
                          .n_seqs = 1,
                          .row_offsets = piece,
                          .starts = start,
                          .slots = slots,
                          .sources = slots};
        op.in[0].ptr = x + cuts[k] * channels, op.out.ptr = again + cuts[k] * channels;
        run_op(&op, &part, &state, 3);
    }
    check_same("pieces", out, again, 4 * 10 * channels);
    check_same("state after pieces", after + 5 * one, pieces + 5 * one, 4 * one);
    release_all();
}

void test_rows(void) {
    const int kinds[] = {QRT_RMS_NORM, QRT_GATED_RMS_NORM, QRT_L2_NORM,
                         QRT_SILU_MUL, QRT_SIGMOID_MUL,    QRT_ADD};
    for (int k = 0; k < 6; k++)
        for (int i = 0; i < N_SHAPES; i++) {
            elementwise(kinds[k], shapes[i], false, 1 + i % 3);
            if (kinds[k] == QRT_SIGMOID_MUL) elementwise(kinds[k], shapes[i], true, 1 + i % 2);
        }
    tiny_values();
    for (int heads = 1; heads < 40; heads += 7) gates(heads);
    for (int threads = 1; threads <= 2; threads++) embed_and_gather(threads);
    rope(2, 256, 64, 11, 11, 5);
    rope(1, 32, 8, 2, 1, 3);
    rope(3, 64, 64, 11, 10, 4);
    rope(8, 128, 32, 0, 0, 7);
    rope(2, 40, 20, 2, 2, 7);
    route();
    conv(64, 4), conv(200, 4), conv(37, 4), conv(50, 3), conv(130, 5), conv(24, 2);
}

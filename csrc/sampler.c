// One token from one row of logits. The vocabulary is seen in blocks of 64 through a table of
// pointers: untouched blocks lie in the caller's logits, and only those that a bias, ban or penalty
// changes are copied. One pass finds each block's maximum; after it, most questions need only the
// few blocks that can matter.
#include "sampler.h"
#include "qrt.h"
#include <float.h>
#include <math.h>
#include <string.h>

enum {
    BLOCK = 64,
    WIDTH = 4,
    BUCKETS = 16384, // of the top_p histogram
    PER_UNIT = 256,  // buckets per unit of logit: the last bucket starts at max - 64
    FIRST_TRY = 256, // top_p looks among so many best tokens before it takes the histogram
};

// What every x86-64 and aarch64 has; the compilers' own operators on it.
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));

typedef struct {
    int32_t n, n_blocks, n_touched;
    const float **block; // [n_blocks] 64 logits each; the last is filled up with -Inf
    float *own;          // [n_blocks * 64] copies of changed blocks, each at its own place
    float *best;         // [n_blocks] maxima
    int32_t *touched;    // [n_blocks] blocks whose maximum is out of date
    double *mass;        // [n_blocks] sums of weights
    double *bucket;      // [BUCKETS]
    uint64_t *keys;      // [n_blocks * 64]
} desk;

// What the samplers kept: the first n of desk.keys, best first, or (n == 0) all logits >= floor.
typedef struct {
    int32_t n;
    float floor, max;
} selection;

// ---- workspace

static void *take(uint8_t *base, size_t *used, size_t bytes) {
    size_t at = *used;
    *used = at + ((bytes + 63) & ~(size_t)63);
    return base ? base + at : NULL;
}

static size_t lay_out(desk *d, uint8_t *base, int32_t n_vocab) {
    size_t used = 0, blocks = ((size_t)n_vocab + BLOCK - 1) / BLOCK;
    d->n = n_vocab;
    d->n_blocks = (int32_t)blocks;
    d->n_touched = 0;
    d->block = take(base, &used, blocks * sizeof *d->block);
    d->own = take(base, &used, blocks * BLOCK * sizeof *d->own);
    d->best = take(base, &used, blocks * sizeof *d->best);
    d->touched = take(base, &used, blocks * sizeof *d->touched);
    d->mass = take(base, &used, blocks * sizeof *d->mass);
    d->bucket = take(base, &used, BUCKETS * sizeof *d->bucket);
    d->keys = take(base, &used, blocks * BLOCK * sizeof *d->keys);
    return used;
}

size_t qrt_sampler_workspace_bytes(int32_t n_vocab) {
    desk d;
    return n_vocab > 0 ? lay_out(&d, NULL, n_vocab) + 64 : 0; // 64: the base is aligned here
}

// ---- passes over blocks

static vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

static vf all(float x) { return (vf){x, x, x, x}; }

static vf larger(vf a, vf b) {
    vi m = a > b;
    return (vf)(((vi)a & m) | ((vi)b & ~m));
}

static float block_max(const float *x) {
    vf a = load(x), b = load(x + WIDTH);
    for (int i = 2 * WIDTH; i < BLOCK; i += 2 * WIDTH) {
        a = larger(load(x + i), a);
        b = larger(load(x + i + WIDTH), b);
    }
    a = larger(a, b);
    float low = a[0] > a[1] ? a[0] : a[1], high = a[2] > a[3] ? a[2] : a[3];
    return low > high ? low : high;
}

// Fills the table and the maxima. Returns false where a logit is NaN or +Inf.
static bool scan(desk *d, const float *logits) {
    int32_t whole = d->n / BLOCK;
    for (int32_t b = 0; b < whole; b++) d->block[b] = logits + (size_t)b * BLOCK;
    if (whole < d->n_blocks) {
        float *tail = d->own + (size_t)whole * BLOCK;
        int32_t rest = d->n - whole * BLOCK;
        memcpy(tail, logits + (size_t)whole * BLOCK, (size_t)rest * sizeof *tail);
        for (int32_t i = rest; i < BLOCK; i++) tail[i] = -INFINITY;
        d->block[whole] = tail;
        d->touched[d->n_touched++] = whole;
    }
    vi sound = {-1, -1, -1, -1};
    for (int32_t b = 0; b < d->n_blocks; b++) {
        for (int i = 0; i < BLOCK; i += WIDTH) sound &= load(d->block[b] + i) <= FLT_MAX;
        d->best[b] = block_max(d->block[b]);
    }
    return (sound[0] & sound[1] & sound[2] & sound[3]) != 0;
}

static float max_of(const desk *d) {
    float m = -INFINITY;
    for (int32_t b = 0; b < d->n_blocks; b++) m = d->best[b] > m ? d->best[b] : m;
    return m;
}

// w[i] = exp((x[i] - max) * inv_t), 0 below floor and where the exponent is below -87. Returns
// their sum. exp: v = n ln2 + r with |r| <= ln2 / 2, e^r by its series; relative error below 2e-7.
static float weigh(const float *x, float max, float inv_t, float floor, float *w) {
    const vf shift = all(12582912.0f); // 1.5 * 2^23: adding it rounds and leaves n in the low bits
    vf sum = all(0);
    for (int i = 0; i < BLOCK; i += WIDTH) {
        vf y = load(x + i), v = (y - max) * inv_t;
        vi kept = (v >= -87.0f) & (y >= floor);
        v = (vf)((vi)v & kept);
        vf z = v * 1.44269504089f + shift, n = z - shift;
        vf r = (v - n * 0.693359375f) + n * 2.12194440e-4f;
        vf p = r * (1.0f / 5040) + 1.0f / 720;
        p = p * r + 1.0f / 120;
        p = p * r + 1.0f / 24;
        p = p * r + 1.0f / 6;
        p = p * r + 0.5f;
        p = p * r + 1.0f;
        p = p * r + 1.0f;
        p = (vf)(((vi)p + ((vi)z << 23)) & kept);
        memcpy(w + i, &p, sizeof p);
        sum += p;
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Fills mass and returns its sum: 64 weights add up in float32, the blocks in float64.
static double weigh_all(desk *d, float max, float inv_t, float floor) {
    float w[BLOCK];
    double total = 0;
    for (int32_t b = 0; b < d->n_blocks; b++) {
        bool seen = d->best[b] >= floor && (d->best[b] - max) * inv_t >= -87.0f;
        d->mass[b] = seen ? (double)weigh(d->block[b], max, inv_t, floor, w) : 0;
        total += d->mass[b];
    }
    return total;
}

// ---- bias, bans, penalties

static float *own(desk *d, int32_t id) {
    int32_t b = id / BLOCK;
    float *copy = d->own + (size_t)b * BLOCK;
    if (d->block[b] != copy) {
        memcpy(copy, d->block[b], BLOCK * sizeof *copy);
        d->block[b] = copy;
        d->touched[d->n_touched++] = b;
    }
    return copy + id % BLOCK;
}

// Keeps finite logits finite whatever a penalty does, and -Inf as it is.
static void set(float *x, double value) {
    if (*x == -INFINITY) return;
    *x = (float)(value > FLT_MAX ? FLT_MAX : value < -FLT_MAX ? -FLT_MAX : value);
}

static void adjust(desk *d, const qrt_sampling *s) {
    for (int32_t i = 0; i < s->n_bias; i++) {
        float *x = own(d, s->bias_ids[i]);
        set(x, (double)*x + s->bias[i]);
    }
    for (int32_t i = 0; i < s->n_banned; i++) *own(d, s->banned[i]) = -INFINITY;
    if (s->repetition != 1) {
        for (int32_t i = 0; i < s->n_window; i++) {
            float *x = own(d, s->window[i]);
            set(x, *x > 0 ? *x / s->repetition : *x * s->repetition);
        }
    }
    if (s->frequency != 0 || s->presence != 0) {
        for (int32_t i = 0; i < s->n_generated; i++) {
            float *x = own(d, s->generated[i]);
            if (s->counts[i] > 0) set(x, *x - s->counts[i] * s->frequency - s->presence);
        }
    }
    for (int32_t i = 0; i < d->n_touched; i++) {
        d->best[d->touched[i]] = block_max(d->block[d->touched[i]]);
    }
}

// ---- order: keys are unique, and ascending keys are descending logits, equal ones by id

static uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static uint64_t key_of(float x, int32_t id) {
    uint32_t u = bits_of(x + 0.0f); // -0 and 0 are one value
    u = u >> 31 ? u : u ^ 0x7fffffff;
    return (uint64_t)u << 32 | (uint32_t)id;
}

static float value_of(uint64_t key) {
    uint32_t u = (uint32_t)(key >> 32);
    return float_of(u >> 31 ? u : u ^ 0x7fffffff);
}

static int32_t id_of(uint64_t key) { return (int32_t)(uint32_t)key; }

static void sift(uint64_t *heap, int32_t n, int32_t i) {
    uint64_t x = heap[i];
    for (;;) {
        int32_t child = 2 * i + 1;
        if (child >= n) break;
        child += child + 1 < n && heap[child + 1] > heap[child];
        if (heap[child] <= x) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = x;
}

static void heapify(uint64_t *heap, int32_t n) {
    for (int32_t i = n / 2; i-- > 0;) sift(heap, n, i);
}

static void sort(uint64_t *keys, int32_t n) {
    int32_t sorted = 1;
    while (sorted < n && keys[sorted - 1] < keys[sorted]) sorted++;
    if (sorted >= n) return; // a run of equal logits, as it comes
    heapify(keys, n);
    for (int32_t i = n - 1; i > 0; i--) {
        uint64_t last = keys[0];
        keys[0] = keys[i];
        keys[i] = last;
        sift(keys, i, 0);
    }
}

// Keeps the k least keys; from the k-th on they are a heap with the greatest on top. Returns how
// many it holds.
static int32_t hold(uint64_t *heap, int32_t n, int32_t k, uint64_t key) {
    if (n < k) {
        heap[n++] = key;
        if (n == k) heapify(heap, n);
    } else if (key < heap[0]) {
        heap[0] = key;
        sift(heap, n, 0);
    }
    return n;
}

// Leaves the k best tokens in keys, best first, and returns how many they are (fewer where n is
// below k). The k-th best block maximum is a floor for the k-th best logit: few blocks reach it.
static int32_t best_of(desk *d, int32_t k) {
    float floor = -INFINITY;
    int32_t n = 0;
    if (k <= d->n_blocks) {
        for (int32_t b = 0; b < d->n_blocks; b++) n = hold(d->keys, n, k, key_of(d->best[b], b));
        floor = value_of(d->keys[0]);
        n = 0;
    }
    for (int32_t b = 0; b < d->n_blocks; b++) {
        if (d->best[b] < floor || (n == k && d->best[b] <= floor)) continue;
        const float *x = d->block[b];
        int32_t first = b * BLOCK, size = d->n - first < BLOCK ? d->n - first : BLOCK;
        for (int32_t i = 0; i < size; i++) {
            if (x[i] < floor || (n == k && x[i] <= floor)) continue;
            n = hold(d->keys, n, k, key_of(x[i], first + i));
            if (n == k) floor = value_of(d->keys[0]);
        }
    }
    sort(d->keys, n);
    return n;
}

// ---- top_k, top_p, min_p

static double weight_of(uint64_t key, float max, double temperature) {
    return exp(((double)value_of(key) - max) / temperature);
}

// The number of leading keys at which the sum of weights reaches the target; n + 1 where it does
// not.
static int32_t reach(const uint64_t *keys, int32_t n, float max, double sum, double target) {
    for (int32_t i = 0; i < n; i++) {
        sum += weight_of(keys[i], max, 1);
        if (sum >= target) return i + 1;
    }
    return n + 1;
}

// The floor of top_p for sets too large to sort: a histogram of the weights by logit finds the
// bucket in which the sum is reached, and only that bucket is sorted. Equal logits behind the last
// kept one become -Inf.
static float floor_of_top_p(desk *d, float max, double target) {
    memset(d->bucket, 0, BUCKETS * sizeof *d->bucket);
    for (int32_t b = 0; b < d->n_blocks; b++) {
        const float *x = d->block[b];
        float w[BLOCK];
        int32_t at[BLOCK];
        weigh(x, max, 1, -INFINITY, w);
        for (int i = 0; i < BLOCK; i += WIDTH) {
            vf q = -larger((load(x + i) - max) * PER_UNIT, all(1 - BUCKETS));
            vi whole = __builtin_convertvector(q, vi);
            memcpy(at + i, &whole, sizeof whole);
        }
        for (int i = 0; i < BLOCK; i++) d->bucket[at[i]] += w[i];
    }
    double sum = 0;
    int32_t last = 0;
    while (last < BUCKETS - 1 && sum + d->bucket[last] < target) sum += d->bucket[last++];
    if (last == BUCKETS - 1) return -INFINITY; // what is left is below 1e-22 of the whole
    int32_t n = 0;
    const float lowest = (float)last, end = (float)(last + 1);
    for (int32_t b = 0; b < d->n_blocks; b++) {
        const float *x = d->block[b];
        vi hit = {0};
        for (int i = 0; i < BLOCK; i += WIDTH) {
            vf q = (max - load(x + i)) * PER_UNIT;
            hit |= (q >= lowest) & (q < end);
        }
        if (!(hit[0] | hit[1] | hit[2] | hit[3])) continue;
        for (int i = 0; i < BLOCK; i++) {
            float q = (max - x[i]) * PER_UNIT;
            if (q >= lowest && q < end) d->keys[n++] = key_of(x[i], b * BLOCK + i);
        }
    }
    sort(d->keys, n);
    int32_t kept = reach(d->keys, n, max, sum, target);
    if (kept > n) kept = n;
    float floor = value_of(d->keys[kept - 1]);
    for (int32_t i = kept; i < n && value_of(d->keys[i]) == floor; i++) {
        *own(d, id_of(d->keys[i])) = -INFINITY;
    }
    return floor;
}

static int32_t arg_max(const desk *d, float max) {
    int32_t b = 0, i = 0;
    while (d->best[b] != max) b++;
    while (d->block[b][i] != max) i++;
    return b * BLOCK + i;
}

// p >= min_p * p_max as a bound for logits, the least float32 that satisfies it.
static float floor_of_min_p(float max, double min_p) {
    if (min_p <= 0) return -FLT_MAX;
    double exact = max + log(min_p);
    float floor = (float)exact;
    return floor < exact ? nextafterf(floor, INFINITY) : floor;
}

static int keep(desk *d, const qrt_sampling *s, selection *out) {
    float max = max_of(d), floor = floor_of_min_p(max, s->min_p);
    int32_t n = 0;
    if (max == -INFINITY) return QRT_NO_TOKEN;
    if (s->temperature < 1e-5) {
        d->keys[0] = key_of(max, arg_max(d, max));
        n = 1;
    } else if (s->top_k > 0 && s->top_k < d->n) {
        n = best_of(d, s->top_k);
        while (value_of(d->keys[n - 1]) == -INFINITY) n--;
        if (s->top_p < 1) {
            double total = 0;
            for (int32_t i = 0; i < n; i++) total += weight_of(d->keys[i], max, 1);
            int32_t kept = reach(d->keys, n, max, 0, s->top_p * total);
            n = kept < n ? kept : n;
        }
    } else if (s->top_p < 1) {
        double target = s->top_p * weigh_all(d, max, 1, -FLT_MAX);
        int32_t tried = best_of(d, FIRST_TRY), kept = reach(d->keys, tried, max, 0, target);
        if (kept <= tried) {
            n = kept;
        } else {
            float reached = floor_of_top_p(d, max, target);
            floor = reached > floor ? reached : floor;
        }
    }
    while (n > 1 && value_of(d->keys[n - 1]) < floor) n--;
    *out = (selection){n, floor, max};
    return QRT_OK;
}

// ---- random numbers: Philox 4x32 with 10 rounds, keyed by the seed, counting (position, choice)

double qrt_sample_uniform(uint64_t seed, uint32_t choice, uint64_t position) {
    uint32_t c0 = (uint32_t)position, c1 = (uint32_t)(position >> 32), c2 = choice, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53 * c0, b = (uint64_t)0xCD9E8D57 * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return (double)(((uint64_t)c1 << 32 | c0) >> 11) * 0x1p-53;
}

// ---- draw

static int32_t draw_listed(const desk *d, const selection *kept, double temperature, double u) {
    double total = 0, sum = 0;
    for (int32_t i = 0; i < kept->n; i++) total += weight_of(d->keys[i], kept->max, temperature);
    for (int32_t i = 0; i + 1 < kept->n; i++) {
        sum += weight_of(d->keys[i], kept->max, temperature);
        if (sum > u * total) return id_of(d->keys[i]);
    }
    return id_of(d->keys[kept->n - 1]);
}

static int32_t draw_dense(desk *d, const selection *kept, float inv_t, double u) {
    double target = u * weigh_all(d, kept->max, inv_t, kept->floor), sum = 0;
    int32_t chosen = 0, id = -1;
    for (int32_t b = 0; b < d->n_blocks;
         b++) { // rounding may pass the end: then the last block with weight
        if (d->mass[b] == 0) continue;
        chosen = b;
        if (sum + d->mass[b] > target) break;
        sum += d->mass[b];
    }
    float w[BLOCK];
    weigh(d->block[chosen], kept->max, inv_t, kept->floor, w);
    for (int i = 0; i < BLOCK; i++) {
        if (w[i] == 0) continue;
        id = chosen * BLOCK + i;
        sum += w[i];
        if (sum > target) break;
    }
    return id;
}

// ---- entry points

static bool in_range(const int32_t *ids, int32_t n, int32_t n_vocab) {
    for (int32_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= n_vocab) return false;
    }
    return true;
}

static int open(desk *d, const float *logits, int32_t n_vocab, const qrt_sampling *s,
                void *workspace) {
    if (n_vocab < 1 || !in_range(s->bias_ids, s->n_bias, n_vocab) ||
        !in_range(s->banned, s->n_banned, n_vocab) || !in_range(s->window, s->n_window, n_vocab) ||
        !in_range(s->generated, s->n_generated, n_vocab)) {
        return QRT_BAD_ARGUMENT;
    }
    lay_out(d, (uint8_t *)(((uintptr_t)workspace + 63) & ~(uintptr_t)63), n_vocab);
    return scan(d, logits) && max_of(d) > -INFINITY ? QRT_OK : QRT_NOT_FINITE;
}

int qrt_sample(const float *logits, int32_t n_vocab, const qrt_sampling *s, void *workspace,
               int32_t *id, float *logprob, int32_t n_top, int32_t *top_ids, float *top_logprobs) {
    desk d;
    selection kept;
    int status = open(&d, logits, n_vocab, s, workspace);
    if (status != QRT_OK) return status;
    double log_sum = 0;
    if (n_top >= 0) { // before adjust: these are of the raw logits
        if (n_top > n_vocab) return QRT_BAD_ARGUMENT;
        float max = max_of(&d);
        log_sum = max + log(weigh_all(&d, max, 1, -FLT_MAX));
        int32_t found = n_top > 0 ? best_of(&d, n_top) : 0;
        for (int32_t i = 0; i < found; i++) {
            top_ids[i] = id_of(d.keys[i]);
            top_logprobs[i] = (float)(value_of(d.keys[i]) - log_sum);
        }
    }
    adjust(&d, s);
    status = keep(&d, s, &kept);
    if (status != QRT_OK) return status;
    double u = qrt_sample_uniform(s->seed, s->choice, s->position);
    if (kept.n == 1) {
        *id = id_of(d.keys[0]);
    } else if (kept.n > 1) {
        *id = draw_listed(&d, &kept, s->temperature, u);
    } else {
        *id = draw_dense(&d, &kept, (float)(1 / s->temperature), u);
    }
    if (n_top >= 0) *logprob = (float)(logits[*id] - log_sum);
    return QRT_OK;
}

int qrt_sample_distribution(const float *logits, int32_t n_vocab, const qrt_sampling *s,
                            void *workspace, int32_t *ids, double *probs, int32_t *n) {
    desk d;
    selection kept;
    int status = open(&d, logits, n_vocab, s, workspace);
    if (status != QRT_OK) return status;
    adjust(&d, s);
    status = keep(&d, s, &kept);
    if (status != QRT_OK) return status;
    double total = 0;
    if (kept.n > 0) {
        double temperature = kept.n > 1 ? s->temperature : 1;
        for (int32_t i = 0; i < kept.n; i++) {
            ids[i] = id_of(d.keys[i]);
            probs[i] = weight_of(d.keys[i], kept.max, temperature);
            total += probs[i];
        }
        *n = kept.n;
    } else {
        float w[BLOCK], inv_t = (float)(1 / s->temperature);
        *n = 0;
        for (int32_t b = 0; b < d.n_blocks; b++) {
            if (d.best[b] < kept.floor) continue;
            weigh(d.block[b], kept.max, inv_t, kept.floor, w);
            for (int i = 0; i < BLOCK; i++) {
                if (d.block[b][i] < kept.floor) continue;
                ids[*n] = b * BLOCK + i;
                probs[(*n)++] = w[i];
                total += w[i];
            }
        }
    }
    for (int32_t i = 0; i < *n; i++) probs[i] /= total;
    return QRT_OK;
}

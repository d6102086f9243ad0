// Draws one token from a row of logits. Nothing is allocated and the logits are never written: the
// caller gives a workspace, which one thread may use again for every row and request.
#ifndef QRT_SAMPLER_H
#define QRT_SAMPLER_H
#include <stddef.h>
#include <stdint.h>

// Statuses beside those of qrt.h.
enum {
    QRT_NOT_FINITE = 32, // NaN or +Inf among the raw logits, or none above -Inf
    QRT_NO_TOKEN = 33,   // bias, bans and -Inf leave no token to draw
};

// Order: bias, bans, repetition, frequency and presence penalties, top_k, top_p, min_p,
// temperature, draw.
typedef struct {
    double temperature; // below 1e-5: arg-max, lowest id on ties, top_k to min_p without effect
    double top_p, min_p;
    double repetition, frequency, presence;
    int32_t top_k;   // below 1: off
    uint32_t choice; // the random number depends on seed, choice and position only
    uint64_t seed, position;
    const int32_t *bias_ids; // distinct ids
    const float *bias;
    const int32_t
        *banned; // ids never drawn: vocabulary padding, banned words, EOG where it is ignored
    const int32_t *window;    // distinct ids that the repetition penalty acts on
    const int32_t *generated; // distinct generated ids and how often each occurred
    const int32_t *counts;
    int32_t n_bias, n_banned, n_window, n_generated;
} qrt_sampling;

size_t qrt_sampler_workspace_bytes(int32_t n_vocab);

// logits: [n_vocab]. n_top -1: no log-probabilities are computed; else *logprob and the n_top best
// ids with theirs, best first, are given: of the softmax of the raw logits over the whole
// vocabulary.
int qrt_sample(const float *logits, int32_t n_vocab, const qrt_sampling *, void *workspace,
               int32_t *id, float *logprob, int32_t n_top, int32_t *top_ids, float *top_logprobs);

// The distribution that qrt_sample draws from: *n kept ids and their probabilities, room for
// n_vocab each.
int qrt_sample_distribution(const float *logits, int32_t n_vocab, const qrt_sampling *,
                            void *workspace, int32_t *ids, double *probs, int32_t *n);

// Uniform in [0, 1) with 53 bits.
double qrt_sample_uniform(uint64_t seed, uint32_t choice, uint64_t position);
#endif

# Binding of csrc/sampler.c, included by _native.pyx. Statuses go back to the caller, which owns the exceptions.
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

cdef extern from "sampler.h" nogil:
    ctypedef struct qrt_sampling:
        double temperature, top_p, min_p
        double repetition, frequency, presence
        int32_t top_k
        uint32_t choice
        uint64_t seed, position
        const int32_t *bias_ids
        const float *bias
        const int32_t *banned
        const int32_t *window
        const int32_t *generated
        const int32_t *counts
        int32_t n_bias, n_banned, n_window, n_generated
    size_t qrt_sampler_workspace_bytes(int32_t n_vocab)
    int qrt_sample(const float *logits, int32_t n_vocab, const qrt_sampling *s, void *workspace, int32_t *id,
                   float *logprob, int32_t n_top, int32_t *top_ids, float *top_logprobs)
    int qrt_sample_distribution(const float *logits, int32_t n_vocab, const qrt_sampling *s, void *workspace,
                                int32_t *ids, double *probs, int32_t *n)
    double qrt_sample_uniform(uint64_t seed, uint32_t choice, uint64_t position)

SAMPLE_NOT_FINITE = 32
SAMPLE_NO_TOKEN = 33


cdef const int32_t *_id_list(const int32_t[::1] view) noexcept:
    return &view[0] if view.shape[0] else NULL


cdef class Sampling:
    """The fields of one request's sampler; the arrays are those of the Python side and are kept alive here.

    bias_ids, banned: int32; bias: float32; all contiguous, ids below n_vocab (else status 3 when sampling).
    """
    cdef qrt_sampling fields
    cdef const int32_t[::1] _bias_ids
    cdef const int32_t[::1] _banned
    cdef const int32_t[::1] _window
    cdef const int32_t[::1] _generated
    cdef const int32_t[::1] _counts
    cdef const float[::1] _bias

    def __init__(self, double temperature, int32_t top_k, double top_p, double min_p, double repetition,
                 double frequency, double presence, uint64_t seed, uint32_t choice,
                 const int32_t[::1] bias_ids, const float[::1] bias):
        if bias_ids.shape[0] != bias.shape[0]:
            raise ValueError("bias_ids and bias differ in length")
        self.fields.temperature = temperature
        self.fields.top_k = top_k
        self.fields.top_p = top_p
        self.fields.min_p = min_p
        self.fields.repetition = repetition
        self.fields.frequency = frequency
        self.fields.presence = presence
        self.fields.seed = seed
        self.fields.choice = choice
        self._bias_ids = bias_ids
        self._bias = bias
        self.fields.bias_ids = _id_list(bias_ids)
        self.fields.bias = &bias[0] if bias.shape[0] else NULL
        self.fields.n_bias = <int32_t>bias_ids.shape[0]

    def set_banned(self, const int32_t[::1] ids):
        """Replace the list of ids that are never drawn."""
        self._banned = ids
        self.fields.banned = _id_list(ids)
        self.fields.n_banned = <int32_t>ids.shape[0]

    def set_window(self, const int32_t[::1] ids, Py_ssize_t n):
        """The first n of ids are the distinct ids of the repetition window; read at each sample."""
        if not 0 <= n <= ids.shape[0]:
            raise ValueError("n is out of range")
        self._window = ids
        self.fields.window = _id_list(ids)
        self.fields.n_window = <int32_t>n

    def set_generated(self, const int32_t[::1] ids, const int32_t[::1] counts, Py_ssize_t n):
        """The first n of ids and counts are the distinct generated ids; read at each sample."""
        if not (0 <= n <= ids.shape[0] and n <= counts.shape[0]):
            raise ValueError("n is out of range")
        self._generated = ids
        self._counts = counts
        self.fields.generated = _id_list(ids)
        self.fields.counts = _id_list(counts)
        self.fields.n_generated = <int32_t>n


cdef int _check(const float[::1] logits, uint8_t[::1] workspace) except -1:
    if not 0 < logits.shape[0] < 2 ** 31:
        raise ValueError("logits must hold 1 to 2^31 - 1 values")
    if <size_t>workspace.shape[0] < qrt_sampler_workspace_bytes(<int32_t>logits.shape[0]):
        raise ValueError("the workspace is smaller than sampler_workspace_bytes(n_vocab)")
    return 0


def sampler_workspace_bytes(int32_t n_vocab):
    """Bytes of workspace that sample() needs for rows of n_vocab logits."""
    return qrt_sampler_workspace_bytes(n_vocab)


def sample(const float[::1] logits, Sampling sampling, uint64_t position, uint8_t[::1] workspace, int32_t n_top,
           int32_t[::1] top_ids, float[::1] top_logprobs):
    """Draw one token: (status, id, logprob).

    n_top -1: no log-probabilities (logprob is 0); else top_ids and top_logprobs are filled with the n_top best.
    """
    cdef int32_t id = -1
    cdef float logprob = 0
    cdef int status
    _check(logits, workspace)
    if n_top > top_ids.shape[0] or n_top > top_logprobs.shape[0]:
        raise ValueError("top_ids and top_logprobs are shorter than n_top")
    sampling.fields.position = position
    with nogil:
        status = qrt_sample(&logits[0], <int32_t>logits.shape[0], &sampling.fields, &workspace[0], &id, &logprob,
                            n_top, &top_ids[0], &top_logprobs[0])
    return status, id, logprob


def sample_distribution(const float[::1] logits, Sampling sampling, uint8_t[::1] workspace, int32_t[::1] ids,
                        double[::1] probs):
    """Fill ids and probs (n_vocab each) with the kept tokens and their probabilities: (status, number of them)."""
    cdef int32_t n = 0
    cdef int status
    _check(logits, workspace)
    if ids.shape[0] < logits.shape[0] or probs.shape[0] < logits.shape[0]:
        raise ValueError("ids and probs must be as long as logits")
    with nogil:
        status = qrt_sample_distribution(&logits[0], <int32_t>logits.shape[0], &sampling.fields, &workspace[0],
                                         &ids[0], &probs[0], &n)
    return status, n


def sample_uniform(uint64_t seed, uint32_t choice, uint64_t position):
    """The random number in [0, 1) for a position of a choice."""
    return qrt_sample_uniform(seed, choice, position)

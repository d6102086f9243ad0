# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=False, binding=False
"""Thin binding of csrc/: memoryviews in, GIL released, a status out. Typed in _native.pyi."""

from libc.stdint cimport int32_t, int64_t, uint8_t


cdef extern from "qrt.h":
    ctypedef struct qrt_pool:
        pass
    ctypedef struct qrt_op:
        pass
    ctypedef struct qrt_part:
        pass
    ctypedef struct qrt_state:
        pass
    ctypedef struct qrt_batch:
        int32_t n_rows, n_seqs, n_out, page_width, n_saves
        const int32_t *tokens
        const int32_t *positions
        const int32_t *row_offsets
        const int32_t *starts
        const int32_t *slots
        const int32_t *pages
        const int32_t *out_rows
        const int32_t *sources
        const int32_t *save_rows
        const int32_t *save_slots
    ctypedef void (*dequantize_fn)(const uint8_t *, float *, int64_t) noexcept nogil
    ctypedef int (*quantize_fn)(const float *, const float *, uint8_t *, int64_t) noexcept nogil
    ctypedef struct qrt_kernels:
        const char *isa
        dequantize_fn *dequantize
        quantize_fn *quantize
    const char *const *qrt_isa_names
    int qrt_isa_usable(const char *) nogil
    const qrt_kernels *qrt_isa(const char *) nogil
    int qrt_pool_create(int, qrt_pool **) nogil
    void qrt_pool_destroy(qrt_pool *) nogil
    int qrt_run(const qrt_kernels *, qrt_pool *, const qrt_op *, int, const qrt_batch *, const qrt_state *,
                double *) nogil
    int qrt_quantize(const qrt_kernels *, qrt_pool *, int, const float *, const float *, uint8_t *, int64_t,
                     int64_t) nogil
    bint qrt_block_size(int, int64_t *, int64_t *) nogil
    double qrt_probe_bandwidth(qrt_pool *, int64_t) nogil
    double qrt_probe_int8(const qrt_kernels *, qrt_pool *) nogil


def struct_sizes():
    return {"op": sizeof(qrt_op), "part": sizeof(qrt_part), "state": sizeof(qrt_state)}


def isa_names():
    names = []
    cdef int i = 0
    while qrt_isa_names[i] != NULL:
        names.append((<bytes>qrt_isa_names[i]).decode())
        i += 1
    return names


def isa_levels():
    return [name for name in isa_names() if qrt_isa_usable(name.encode())]


def best_isa():
    return (<bytes>qrt_isa(NULL).isa).decode()


cdef const qrt_kernels *_kernels(str isa) except NULL:
    cdef bytes name = isa.encode()
    cdef const qrt_kernels *k = qrt_isa(name)
    if k == NULL:
        raise ValueError(isa)
    return k


def dequantize(str isa, int format, const uint8_t[::1] data, float[::1] out):
    cdef const qrt_kernels *k = _kernels(isa)
    if out.shape[0]:
        with nogil:
            k.dequantize[format](&data[0], &out[0], out.shape[0])


QUANTIZE_NOT_FINITE = 5
QUANTIZE_OUT_OF_RANGE = 6


cdef class Pool:
    cdef qrt_pool *pool
    cdef readonly int threads

    def __cinit__(self, int threads):
        cdef int status = qrt_pool_create(threads, &self.pool)
        if status:
            raise MemoryError(f"thread pool: status {status}")
        self.threads = threads

    def close(self):
        cdef qrt_pool *pool = self.pool
        self.pool = NULL
        with nogil:
            qrt_pool_destroy(pool)

    def __dealloc__(self):
        qrt_pool_destroy(self.pool)


cdef const int32_t *_ints(const int32_t[::1] a) noexcept:
    return &a[0] if a.shape[0] else NULL


def run(str isa, Pool pool, const uint8_t[::1] ops, const uint8_t[::1] state,
        const int32_t[::1] tokens, const int32_t[::1] positions, const int32_t[::1] row_offsets,
        const int32_t[::1] starts, const int32_t[::1] slots, const int32_t[::1] pages, int page_width,
        const int32_t[::1] out_rows, const int32_t[::1] sources, const int32_t[::1] save_rows,
        const int32_t[::1] save_slots, double[::1] seconds):
    cdef const qrt_kernels *k = _kernels(isa)
    cdef qrt_batch batch
    cdef int n_ops = <int>(ops.shape[0] // <Py_ssize_t>sizeof(qrt_op))
    cdef double *times = &seconds[0] if seconds is not None else NULL
    cdef int status
    if pool.pool == NULL:
        raise ValueError("the thread pool is closed")
    batch.n_rows = <int32_t>tokens.shape[0]
    batch.n_seqs = <int32_t>starts.shape[0]
    batch.n_out = <int32_t>out_rows.shape[0]
    batch.page_width = page_width
    batch.tokens = _ints(tokens)
    batch.positions = _ints(positions)
    batch.row_offsets = _ints(row_offsets)
    batch.starts = _ints(starts)
    batch.slots = _ints(slots)
    batch.pages = _ints(pages)
    batch.out_rows = _ints(out_rows)
    batch.sources = _ints(sources)
    batch.n_saves = <int32_t>save_rows.shape[0]
    batch.save_rows = _ints(save_rows)
    batch.save_slots = _ints(save_slots)
    with nogil:
        status = qrt_run(k, pool.pool, <const qrt_op *>&ops[0], n_ops, &batch, <const qrt_state *>&state[0], times)
    return status


def quantize(str isa, Pool pool, int format, const float[:, ::1] source, const float[::1] importance,
             uint8_t[::1] target):
    cdef const qrt_kernels *k = _kernels(isa)
    cdef int64_t rows = source.shape[0], cols = source.shape[1], elements = 0, size = 0
    cdef const float *weights = NULL
    cdef int status
    if pool.pool == NULL:
        raise ValueError("the thread pool is closed")
    if not qrt_block_size(format, &elements, &size) or k.quantize[format] == NULL:
        raise ValueError(f"format {format} cannot be written")
    if cols % elements or target.shape[0] != rows * (cols // elements) * size:
        raise ValueError(
            f"{rows} x {cols} values do not fill {target.shape[0]} bytes in blocks of {elements} ({size} bytes)"
        )
    if importance.shape[0]:
        if importance.shape[0] != cols:
            raise ValueError(f"{importance.shape[0]} importance weights for {cols} columns")
        weights = &importance[0]
    if rows * cols == 0:
        return 0
    with nogil:
        status = qrt_quantize(k, pool.pool, format, &source[0, 0], weights, &target[0], rows, cols)
    return status


def probe_bandwidth(Pool pool, int64_t mib):
    cdef double gb_per_s
    with nogil:
        gb_per_s = qrt_probe_bandwidth(pool.pool, mib)
    if gb_per_s < 0:
        raise MemoryError(f"no {mib} MiB for the bandwidth probe")
    return gb_per_s


def probe_int8(str isa, Pool pool):
    cdef const qrt_kernels *k = _kernels(isa)
    cdef double gops
    with nogil:
        gops = qrt_probe_int8(k, pool.pool)
    return gops


include "_native_sampler.pxi"

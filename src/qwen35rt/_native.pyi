import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[np.uint8]
_Ints = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float32]

def struct_sizes() -> dict[str, int]:
    """sizeof of the C structs that backends/cpu/lower.py lays out."""

def isa_names() -> list[str]:
    """Instruction levels of this build, lowest first."""

def isa_levels() -> list[str]:
    """Levels that this machine and operating system can run."""

def best_isa() -> str:
    """The highest of isa_levels()."""

def dequantize(isa: str, format: int, data: _Bytes, out: _Floats) -> None:
    """Expand a row; format is the index in formats.FORMATS order of csrc/blocks.h (float formats first)."""

QUANTIZE_NOT_FINITE: int
QUANTIZE_OUT_OF_RANGE: int

class Pool:
    """A pool of ``threads`` threads, the calling one included."""

    threads: int
    def __init__(self, threads: int) -> None: ...
    def close(self) -> None: ...

def run(
    isa: str,
    pool: Pool,
    ops: _Bytes,
    state: _Bytes,
    tokens: _Ints,
    positions: _Ints,
    row_offsets: _Ints,
    starts: _Ints,
    slots: _Ints,
    pages: _Ints,
    page_width: int,
    out_rows: _Ints,
    sources: _Ints,
    save_rows: _Ints,
    save_slots: _Ints,
    seconds: npt.NDArray[np.float64] | None,
) -> int:
    """One step; returns a status of csrc/qrt.h (0: done)."""

def quantize(
    isa: str,
    pool: Pool,
    format: int,
    source: npt.NDArray[np.float32],
    importance: _Floats,
    target: _Bytes,
) -> int:
    """Quantise rows [rows, cols] into ``target``, the rows' blocks one after another; the squared error is kept low.

    ``format`` counts as in dequantize(). ``importance``: empty, or [cols] weights of the squared error, not negative.
    Returns 0, QUANTIZE_NOT_FINITE (NaN or infinity in source), QUANTIZE_OUT_OF_RANGE (a scale exceeds float16) or 3
    (importance negative or not finite). Raises ValueError for sizes that do not fit or a format that is only read.
    """

def probe_bandwidth(pool: Pool, mib: int) -> float:
    """GB/s at which all threads together read memory (fastest of many slices)."""

def probe_int8(isa: str, pool: Pool) -> float:
    """10^9 int8 operations per second of all threads together, on registers."""

SAMPLE_NOT_FINITE: int
SAMPLE_NO_TOKEN: int

class Sampling:
    """The fields of one request's sampler; keeps the arrays it is given."""

    def __init__(
        self,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition: float,
        frequency: float,
        presence: float,
        seed: int,
        choice: int,
        bias_ids: _Ints,
        bias: _Floats,
    ) -> None: ...
    def set_banned(self, ids: _Ints) -> None: ...
    def set_window(self, ids: _Ints, n: int) -> None: ...
    def set_generated(self, ids: _Ints, counts: _Ints, n: int) -> None: ...

def sampler_workspace_bytes(n_vocab: int) -> int:
    """Bytes of workspace that sample() needs for rows of n_vocab logits."""

def sample(
    logits: _Floats,
    sampling: Sampling,
    position: int,
    workspace: _Bytes,
    n_top: int,
    top_ids: _Ints,
    top_logprobs: _Floats,
) -> tuple[int, int, float]:
    """Draw one token: (status, id, logprob); n_top -1: no log-probabilities."""

def sample_distribution(
    logits: _Floats, sampling: Sampling, workspace: _Bytes, ids: _Ints, probs: npt.NDArray[np.float64]
) -> tuple[int, int]:
    """Fill ids and probs with the kept tokens and their probabilities: (status, number of them)."""

def sample_uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1) for a position of a choice."""

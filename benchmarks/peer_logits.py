"""llama.cpp's logits at every scored position of chunks of token ids, by the C interface within the xllamacpp wheel.

The wheel's server tells distributions of one position at a time, as JSON, which takes a hundred times as long. Of the C
interface only functions and the batch are used: parameters stay as llama.cpp's defaults, whose layout differs between
versions. Run as a script it is the process that loads the wheel.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from runtimes import source_environment

Array = npt.NDArray[Any]


def peer_logits(path: Path, chunks: Array, n_vocab: int, threads: int) -> Array:
    """Logits after each token of ``chunks[:, n_ctx // 2 : -1]``, chunk by chunk: float32 [n, n_vocab].

    ``chunks``: ids [chunks, n_ctx]. Raises RuntimeError with the end of llama.cpp's log if it fails.
    """
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+b") as log:
        given, made = Path(folder) / "ids.npy", Path(folder) / "logits.npy"
        np.save(given, chunks)
        command = [sys.executable, __file__, str(path), str(threads), str(n_vocab), str(given), str(made)]
        done = subprocess.run(command, stdout=log, stderr=log, env=source_environment(), check=False)
        if done.returncode or not made.exists():
            log.seek(0)
            raise RuntimeError(f"llama.cpp on {path}: {log.read().decode(errors='replace')[-2000:]}")
        return np.asarray(np.load(made))


class Parameters(ctypes.Structure):
    """Any parameters: passed on as they came, and larger than every version's."""

    _fields_ = (("bytes", ctypes.c_char * 2048),)


class LlamaBatch(ctypes.Structure):
    """``llama_batch``."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def open_library() -> Any:
    """llama.cpp with the types of the functions that are used here."""
    import xllamacpp.xllamacpp

    library, pointer, integer = ctypes.CDLL(xllamacpp.xllamacpp.__file__), ctypes.c_void_p, ctypes.c_int32
    types: dict[str, tuple[Any, list[Any]]] = {
        "llama_backend_init": (None, []),
        "llama_model_default_params": (Parameters, []),
        "llama_model_load_from_file": (pointer, [ctypes.c_char_p, Parameters]),
        "llama_context_default_params": (Parameters, []),
        "llama_init_from_model": (pointer, [pointer, Parameters]),
        "llama_model_get_vocab": (pointer, [pointer]),
        "llama_vocab_n_tokens": (integer, [pointer]),
        "llama_n_ctx": (ctypes.c_uint32, [pointer]),
        "llama_set_n_threads": (None, [pointer, integer, integer]),
        "llama_get_memory": (pointer, [pointer]),
        "llama_memory_clear": (None, [pointer, ctypes.c_bool]),
        "llama_batch_init": (LlamaBatch, [integer, integer, integer]),
        "llama_decode": (integer, [pointer, LlamaBatch]),
        "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [pointer, integer]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def run(path: str, chunks: Array, n_vocab: int, threads: int) -> Array:
    """What ``peer_logits`` gives, in this process. Raises RuntimeError."""
    library = open_library()
    library.llama_backend_init()
    model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
    if not model:
        raise RuntimeError("the model was not loaded")
    if library.llama_vocab_n_tokens(library.llama_model_get_vocab(model)) != n_vocab:
        raise RuntimeError("another size of the vocabulary")
    context = library.llama_init_from_model(model, library.llama_context_default_params())
    n_ctx = chunks.shape[1]
    if not context or library.llama_n_ctx(context) < n_ctx:
        raise RuntimeError(f"no context of {n_ctx} tokens")
    library.llama_set_n_threads(context, threads, threads)
    first, rows = n_ctx // 2, []
    for chunk in chunks[:, :-1].tolist():
        library.llama_memory_clear(library.llama_get_memory(context), True)
        batch = library.llama_batch_init(len(chunk), 0, 1)
        batch.n_tokens = len(chunk)
        for i, token in enumerate(chunk):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, i, 1, 0
            batch.logits[i] = i >= first
        if library.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        for i in range(first, len(chunk)):
            found = library.llama_get_logits_ith(context, i)
            rows.append(np.ctypeslib.as_array(found, (n_vocab,)).copy())
    return np.array(rows)


def main() -> None:
    """The child."""
    path, threads, n_vocab, given, made = sys.argv[1:]
    np.save(made, run(path, np.load(given), int(n_vocab), int(threads)))
    os._exit(0)  # nothing is freed one by one


if __name__ == "__main__":
    main()

"""Memory on the CPU backend: weights are held once (B43 tied embeddings, B89), measured in child processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .fixtures import Stored, TinySpec, tiny_metadata, tiny_tensors, write_gguf
from .implementations import native
from .tiny_vocab import CHATML, tiny_vocab

pytestmark = [
    pytest.mark.skipif(native() is None, reason="the compiled module qwen35rt._native is not built"),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc for the peak of memory"),
]

# What the libraries take is there before the measurement: a tiny model runs first.
CHILD = """
import json, sys, time
import qwen35rt
tiny, path, read_first = sys.argv[1], sys.argv[2], sys.argv[3] == "1"

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) << 10

def run(path):
    progress = (lambda stage, done, total: None) if read_first else None
    # A short context: what is kept for later prompts and other sequences is stated, but not used here.
    with qwen35rt.load(path, device="cpu", threads=2, n_ctx=512, progress=progress) as model:
        done = model.generate("hello" * repeat, max_tokens=5, temperature=0, ignore_eos=True)
        exe = model._executable
        state = sum(a.nbytes for a in (exe._k, exe._v, exe._delta, exe._conv))
        assert done.usage.completion_tokens == 5
        return state, sum(exe.memory.values())

repeat = 1
run(tiny)
before = peak()
repeat = int(sys.argv[4])
state, stated = run(path)
print(json.dumps([peak() - before, state, stated]))
"""


def growth(tiny: Path, path: Path, read_first: bool, repeat: int = 1) -> tuple[int, int, int]:
    """Growth of the peak over load and five tokens, bytes of the state, and all bytes as stated, in a new process."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    line = [sys.executable, "-c", CHILD, str(tiny), str(path), str(int(read_first)), str(repeat)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, env=env, check=False)
    assert done.returncode == 0, done.stderr
    grown, state, stated = json.loads(done.stdout)
    return grown, state, stated


def repeated(block: bytes, *shape: int) -> Any:
    """One block over and over as uint8 [..., row bytes]: takes no time to draw and is no hole in the file."""
    return np.resize(np.frombuffer(block, np.uint8), shape)


Q4_0 = np.float16(0.01).tobytes() + bytes(range(3, 19))  # scale, then 32 codes
Q6_K = bytes(range(192)) + bytes([5] * 16) + np.float16(1e-4).tobytes()


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 layers of Q4_0, 160 MB. The layers of a kind share their arrays, so that writing costs little memory."""
    sizes: dict[str, Any] = {
        "interval": 2, "n_embd": 1024, "n_ff": 4096, "n_head": 8, "head_dim": 128, "n_head_kv": 2, "rope_dim": 8,
        "ssm_state": 64, "ssm_k_heads": 8, "ssm_v_heads": 16,
    }  # fmt: skip
    small = tiny_tensors(TinySpec(n_layer=2, **(sizes | {"n_ff": 32})))
    by_shape: dict[tuple[int, ...], Any] = {}
    stored: dict[str, Stored] = {}
    for name, values in small.items():
        rows, cols = values.shape if values.ndim == 2 else (0, 0)
        rows, cols = (4096 if n == 32 else n for n in (rows, cols))
        item: Stored = values
        if rows >= 320 and cols % 32 == 0 and cols:
            shape = (rows, cols // 32 * 18)
            item = (by_shape.setdefault(shape, repeated(Q4_0, *shape)), "Q4_0")
        first = name.split(".")[1] if name.startswith("blk.") else None
        for i in range(16) if first else (0,):
            if first is None:
                stored[name] = item
            elif i % 2 == int(first):
                stored[name.replace(f"blk.{first}.", f"blk.{i}.")] = item
    meta = tiny_metadata(TinySpec(n_layer=16, **sizes), tiny_vocab(320), CHATML)
    path = write_gguf(tmp_path_factory.mktemp("big") / "big.gguf", meta, stored)
    assert 150e6 < path.stat().st_size < 300e6
    return path


@pytest.mark.parametrize("read_first", [False, True], ids=["as used", "read at load"])
def test_b89_weights_are_in_memory_once(big: Path, tiny_dense: Path, read_first: bool) -> None:
    size = big.stat().st_size
    grown, state, _ = growth(tiny_dense, big, read_first)
    assert 0.9 * size < grown < 1.35 * size + state


def test_b89_stated_memory_is_what_a_full_step_takes(big: Path, tiny_dense: Path) -> None:
    grown, _, stated = growth(tiny_dense, big, True, repeat=150)
    assert abs(stated / grown - 1) < 0.15, (stated, grown)


@pytest.mark.parametrize("form", ["F32", "Q6_K"])
def test_b43_tied_embeddings_are_in_memory_once(tmp_path: Path, tiny_dense: Path, form: str) -> None:
    """A file that is nearly all embedding: a second copy would double it."""
    n_vocab = 16_384 if form == "F32" else 32_768
    wide: dict[str, Any] = {"n_embd": 1024, "n_ff": 256, "head_dim": 128, "ssm_state": 64, "n_vocab": n_vocab}
    blocks = repeated(Q6_K, n_vocab, 840) if form == "Q6_K" else None
    table: Stored = (blocks, form) if blocks is not None else np.full((n_vocab, 1024), 0.01, np.float32)
    tensors: dict[str, Stored] = dict(tiny_tensors(TinySpec(**(wide | {"n_vocab": 320, "tied": True}))))
    tensors["token_embd.weight"] = table
    spec = TinySpec(**wide, tied=True)
    path = write_gguf(tmp_path / "tied.gguf", tiny_metadata(spec, tiny_vocab(n_vocab), CHATML), tensors)
    embedding = (blocks if blocks is not None else table).nbytes  # type: ignore[union-attr]
    untied = write_gguf(
        tmp_path / "untied.gguf",
        tiny_metadata(spec, tiny_vocab(n_vocab), CHATML),
        tensors | {"output.weight": table},
    )
    one, two = (growth(tiny_dense, p, True)[0] for p in (path, untied))
    # The same model with a matrix of its own holds one embedding more; nothing else differs.
    assert 0.8 * embedding < two - one < 1.2 * embedding

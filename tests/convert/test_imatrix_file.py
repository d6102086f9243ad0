"""Importance matrices as files: what is written is read back, what does not fit is refused by name."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType

from qwen35rt.convert.imatrix_file import Entry, Imatrix, check_coverage, read_imatrix, write_imatrix
from qwen35rt.errors import ModelFileError
from qwen35rt.model.gguf_file import open_gguf

from ..fixtures import Float, write_gguf, write_tiny

KEYS: dict[str, Any] = {
    "general.type": "imatrix",
    "imatrix.datasets": ["calibration.txt"],
    "imatrix.chunk_count": 3,
    "imatrix.chunk_size": 512,
}


def numbers(*shape: int) -> Float:
    """Positive numbers."""
    return np.random.default_rng([7, *shape]).random(shape, np.float32)


def sample() -> Imatrix:
    """A dense matrix and one of three experts, of which the second was never reached."""
    return Imatrix(
        {
            "blk.0.ffn_down.weight": Entry(numbers(1, 96), np.array([1536], np.float32)),
            "blk.0.ffn_up_exps.weight": Entry(numbers(3, 64), np.array([10, 0, 30], np.float32)),
        },
        chunk_count=3,
        chunk_size=512,
        datasets=("calibration.txt", "ähnlich.txt"),
    )


def test_written_and_read_back(tmp_path: Path) -> None:
    want = sample()
    write_imatrix(tmp_path / "i.gguf", want)
    got = read_imatrix(tmp_path / "i.gguf")
    assert list(got.entries) == list(want.entries)
    for name, entry in want.entries.items():
        np.testing.assert_array_equal(got.entries[name].in_sum2, entry.in_sum2)
        np.testing.assert_array_equal(got.entries[name].counts, entry.counts)
    assert (got.chunk_count, got.chunk_size, got.datasets) == (3, 512, want.datasets)


def test_the_form_is_the_one_of_llama_imatrix(tmp_path: Path) -> None:
    write_imatrix(tmp_path / "i.gguf", sample())
    reader = gguf.GGUFReader(tmp_path / "i.gguf")
    shapes = {t.name: (list(map(int, t.shape)), t.tensor_type.name) for t in reader.tensors}
    assert shapes == {
        "blk.0.ffn_down.weight.in_sum2": ([96], "F32"),
        "blk.0.ffn_down.weight.counts": ([1], "F32"),
        "blk.0.ffn_up_exps.weight.in_sum2": ([64, 3], "F32"),
        "blk.0.ffn_up_exps.weight.counts": ([1, 3], "F32"),
    }
    types = {name: field.types for name, field in reader.fields.items()}
    assert types["imatrix.chunk_count"] == types["imatrix.chunk_size"] == [GGUFValueType.UINT32]
    assert types["imatrix.datasets"] == [GGUFValueType.ARRAY, GGUFValueType.STRING]
    field = reader.get_field("general.type")
    assert field is not None
    assert field.contents() == "imatrix"


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 3)])
def test_counts_of_experts_in_any_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    counts = np.array([1, 2, 4], np.float32).reshape(shape)
    write_gguf(tmp_path / "i.gguf", KEYS, {"x.weight.in_sum2": numbers(3, 32), "x.weight.counts": counts})
    entry = read_imatrix(tmp_path / "i.gguf").entries["x.weight"]
    assert entry.in_sum2.shape == (3, 32)
    np.testing.assert_array_equal(entry.importance, numbers(3, 32) / np.array([[1], [2], [4]], np.float32))


def test_without_datasets(tmp_path: Path) -> None:
    write_imatrix(tmp_path / "i.gguf", Imatrix(sample().entries, 1, 64))
    assert read_imatrix(tmp_path / "i.gguf").datasets == ()


def test_an_expert_that_was_not_reached_has_neutral_weights() -> None:
    entry = sample().entries["blk.0.ffn_up_exps.weight"]
    np.testing.assert_array_equal(entry.importance[0], entry.in_sum2[0] / 10)
    np.testing.assert_array_equal(entry.importance[1], np.ones(64))
    np.testing.assert_array_equal(entry.importance[2], entry.in_sum2[2] / 30)


def test_coverage_names_missing_and_extra_entries(tmp_path: Path) -> None:
    with open_gguf(write_tiny(tmp_path / "m.gguf")) as f:
        matrix = Imatrix(
            {
                "blk.0.ffn_down.weight": Entry(numbers(1, 96), np.ones(1, np.float32)),
                "blk.9.ffn_down.weight": Entry(numbers(1, 96), np.ones(1, np.float32)),
            },
            1,
            64,
        )
        found = check_coverage(matrix, f.tensors, frozenset({"blk.0.ffn_down.weight", "blk.0.ffn_up.weight"}), "i.gguf")
    assert found.missing == ("blk.0.ffn_up.weight",)
    assert found.extra == ("blk.9.ffn_down.weight",)
    assert "blk.0.ffn_up.weight" in found.notes()[0]
    assert "blk.9.ffn_down.weight" in found.notes()[1]


@pytest.mark.parametrize(("kind", "name"), [("dense", "blk.0.ffn_down.weight"), ("moe", "blk.0.ffn_down_exps.weight")])
def test_an_entry_of_another_shape_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    with open_gguf(write_tiny(tmp_path / "m.gguf", kind)) as f:
        matrix = Imatrix({name: Entry(numbers(2, 32), np.ones(2, np.float32))}, 1, 64)
        with pytest.raises(ModelFileError, match=rf"i\.gguf: the entry '{name}' is for 32 columns of 2 matrices"):
            check_coverage(matrix, f.tensors, frozenset(), "i.gguf")


def test_the_old_form_is_refused_with_the_remedy(tmp_path: Path) -> None:
    name = b"blk.0.ffn_down.weight"
    values = numbers(96).tobytes()
    (tmp_path / "i.dat").write_bytes(struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii", 3, 96) + values)
    with pytest.raises(ModelFileError, match=r"i\.dat: .*old \.dat form.* --in-file i\.dat -o i\.gguf"):
        read_imatrix(tmp_path / "i.dat")


def test_what_is_no_imatrix_is_refused(tmp_path: Path) -> None:
    (tmp_path / "junk.gguf").write_bytes(bytes(range(256)) * 4)
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        read_imatrix(tmp_path / "junk.gguf")
    with pytest.raises(ModelFileError, match="no such file"):
        read_imatrix(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match=r"'general\.type' is 'model', 'imatrix' is needed"):
        read_imatrix(write_tiny(tmp_path / "m.gguf"))
    with pytest.raises(ModelFileError, match="has no entries"):
        read_imatrix(write_gguf(tmp_path / "e.gguf", KEYS, {"x.weight": numbers(32)}))


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
@pytest.mark.parametrize("where", ["in_sum2", "counts"])
def test_numbers_that_cannot_be_are_refused(tmp_path: Path, bad: float, where: str) -> None:
    tensors = {"x.weight.in_sum2": numbers(32), "x.weight.counts": np.ones(1, np.float32)}
    tensors[f"x.weight.{where}"][-1] = bad
    with pytest.raises(ModelFileError, match=rf"'x\.weight\.{where}' holds a negative number, NaN or infinity"):
        read_imatrix(write_gguf(tmp_path / "i.gguf", KEYS, tensors))


def test_sums_and_counts_belong_together(tmp_path: Path) -> None:
    two = np.ones(2, np.float32)
    with pytest.raises(ModelFileError, match=r"'x\.weight\.in_sum2' is of 3 matrices and 'x\.weight\.counts' has 2"):
        read_imatrix(
            write_gguf(tmp_path / "a.gguf", KEYS, {"x.weight.in_sum2": numbers(3, 32), "x.weight.counts": two})
        )
    with pytest.raises(ModelFileError, match=r"tensor 'x\.weight\.counts' is missing"):
        read_imatrix(write_gguf(tmp_path / "b.gguf", KEYS, {"x.weight.in_sum2": numbers(32)}))
    with pytest.raises(ValueError, match="3 experts and counts of the shape"):
        write_imatrix(tmp_path / "c.gguf", Imatrix({"x.weight": Entry(numbers(3, 32), two)}, 1, 64))

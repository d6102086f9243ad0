"""The reader against the gguf package's own, split files, typed getters."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType

from qwen35rt.errors import ModelFileError
from qwen35rt.formats import FORMATS
from qwen35rt.model.gguf_file import GgufFile, Metadata, open_gguf
from qwen35rt.model.gguf_part import Part
from tests.fixtures import TinySpec, tiny_metadata, tiny_tensors, write_gguf, write_tiny
from tests.gguf_raw import random_blocks


def assert_equals_reader(path: Path) -> None:
    f, reader = open_gguf(path), gguf.GGUFReader(path)
    expected = {k: v.contents() for k, v in reader.fields.items() if not k.startswith("GGUF.")}
    assert dict(f.metadata) == expected
    assert {k: type(v) for k, v in f.metadata.items()} == {k: type(v) for k, v in expected.items()}
    assert list(f.tensors) == [t.name for t in reader.tensors]
    for t in reader.tensors:
        mine = f.tensors[t.name]
        assert mine.shape == tuple(int(n) for n in t.shape)
        assert mine.format.id == t.tensor_type
        assert mine.nbytes == t.n_bytes == len(mine.data)
        assert mine.data.tobytes() == t.data.tobytes()
        assert not mine.data.flags.writeable


def test_equals_the_gguf_reader_on_oracle_files(oracle: Path) -> None:
    """Metadata, names, shapes and bytes of every oracle file, the vision tower's too."""
    files = [*sorted((oracle / "models").glob("*.gguf")), oracle / "vision" / "mmproj.f16.gguf"]
    assert len(files) > 10
    for file in files:
        assert_equals_reader(file)


def test_equals_the_gguf_reader_on_every_format_and_value_type(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    integers = {"U8": "UINT8", "I8": "INT8", "U16": "UINT16", "I16": "INT16", "U32": "UINT32", "I32": "INT32"}
    kinds = integers | {"U64": "UINT64", "I64": "INT64"}
    meta: dict[str, Any] = {f"a.{k}": (-5 if k[0] == "I" else 200, GGUFValueType[v]) for k, v in kinds.items()}
    meta |= {
        "a.text": "é\n",
        "a.none": "",
        "a.yes": True,
        "a.f32": 0.1,
        "a.f64": (0.1, GGUFValueType.FLOAT64),
        "a.texts": ["a", "", "ö" * 300],
        "a.bools": [True, False, True],
        "a.floats": [0.5, -1.25],
        "a.ints": [1, 2, 3],
        "general.alignment": 64,
    }
    tensors: dict[str, Any] = {"plain": np.arange(6, dtype=np.float32).reshape(1, 2, 3)}
    for form in FORMATS:
        if form.quantized:
            tensors[form.name] = (random_blocks(rng, form.name, (3, 2 * form.block)), form.name)
    write_gguf(tmp_path / "all.gguf", meta, {"first": tensors["plain"]} | tensors)
    # The gguf writer pads by its own alignment, whatever the key says.
    with pytest.raises(ModelFileError, match=r"alignment 64"):
        open_gguf(tmp_path / "all.gguf")
    del meta["general.alignment"]
    assert_equals_reader(write_gguf(tmp_path / "all.gguf", meta, {"first": tensors["plain"]} | tensors))


def test_data_are_views_that_outlive_close(tiny_dense: Path) -> None:
    with open_gguf(str(tiny_dense)) as f:
        assert f.path == tiny_dense
        assert f.paths == (tiny_dense,)
        assert f.file_bytes == tiny_dense.stat().st_size
        tensor = f.tensors["output_norm.weight"]
        assert not tensor.data.flags.owndata
        before = tensor.data.tobytes()
        metadata = f.metadata
    assert tensor.data.tobytes() == before
    assert f.tensors == {}
    assert len(f.metadata) == 0
    assert len(metadata) > 20


def test_prefault_reports_progress(tiny_dense: Path) -> None:
    f, seen = open_gguf(tiny_dense), []
    f.prefault(lambda done, total: seen.append((done, total)))
    assert seen[-1] == (f.file_bytes, f.file_bytes)


class TestGetters:
    @pytest.fixture
    def f(self, tmp_path: Path) -> GgufFile:
        meta = {
            "u8": (7, GGUFValueType.UINT8),
            "i64": (-7, GGUFValueType.INT64),
            "u64": (2**40, GGUFValueType.UINT64),
            "f32": 1.5,
            "nan": float("nan"),
            "inf": float("inf"),
            "text": "x" * 100,
            "yes": True,
            "ints": ([1, 2, -3], GGUFValueType.ARRAY, GGUFValueType.INT16),
            "bools": [True, False],
            "texts": ["a", "b"],
        }
        return open_gguf(write_gguf(tmp_path / "g.gguf", meta, {}))

    def test_values(self, f: GgufFile) -> None:
        assert f.get_int("u8") == 7
        assert f.get_int("i64", low=-10) == -7
        assert f.get_int("none", 3) == 3
        assert f.get_float("f32") == 1.5
        assert f.get_float("u8") == 7.0
        assert f.get_float("none", 2.5) == 2.5
        assert f.get_bool("yes") is True
        assert f.get_bool("none", False) is False
        assert f.get_str("text") == "x" * 100
        assert f.get_str("none", "") == ""
        assert f.get_ints("ints", low=-3) == [1, 2, -3]
        assert f.get_ints("none", []) == []
        assert f.get_bools("bools") == [True, False]
        assert f.get_strs("texts", count=2) == ["a", "b"]
        assert f.metadata.array_length("texts") == 2
        assert f.metadata.array_length("text") is None

    @pytest.mark.parametrize(
        ("getter", "key"),
        [
            *(("get_int", k) for k in ("none", "i64", "u64", "f32", "nan", "text", "yes", "ints")),
            *(("get_float", k) for k in ("none", "nan", "inf", "text", "yes", "ints")),
            *(("get_bool", k) for k in ("none", "u8", "text", "bools")),
            *(("get_str", k) for k in ("none", "u8", "texts")),
            *(("get_ints", k) for k in ("none", "u8", "ints", "bools", "texts")),
            *(("get_bools", k) for k in ("none", "yes", "ints", "texts")),
            *(("get_strs", k) for k in ("none", "text", "ints", "bools")),
        ],
    )
    def test_a_wrong_value_is_refused_by_key(self, f: GgufFile, getter: str, key: str) -> None:
        with pytest.raises(ModelFileError, match=rf"g\.gguf: key '{key}'") as e:
            getattr(f, getter)(key)
        assert len(str(e.value)) < 300

    def test_ranges_and_lengths(self, f: GgufFile) -> None:
        with pytest.raises(ModelFileError, match=r"key 'u8' is 7; an integer from 8 to 9 is needed"):
            f.get_int("u8", low=8, high=9)
        with pytest.raises(ModelFileError, match=r"key 'f32' is 1.5; a finite number from 2 to 3 is needed"):
            f.get_float("f32", low=2, high=3)
        with pytest.raises(ModelFileError, match=r"key 'texts' is an array of 2 values; 3 are needed"):
            f.get_strs("texts", count=3)


class TestSplit:
    """B40: split models."""

    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[Path]:
        (tmp_path / "m").mkdir()
        first = write_tiny(tmp_path / "m" / "tiny.gguf", parts=3)
        return [first.with_name(f"tiny-{i:05d}-of-00003.gguf") for i in (1, 2, 3)]

    def assert_is_tiny(self, f: GgufFile, whole: Path, n_parts: int) -> None:
        single = open_gguf(whole)
        assert len(f.paths) == n_parts
        assert f.metadata["qwen35.block_count"] == 4
        assert list(f.tensors) == list(single.tensors)
        for name, t in single.tensors.items():
            assert f.tensors[name].data.tobytes() == t.data.tobytes()
            assert f.tensors[name].shape == t.shape

    def test_b40_from_any_part_or_the_folder(self, parts: list[Path], tiny_dense: Path) -> None:
        (parts[0].parent / "mmproj-tiny.gguf").write_bytes(b"not looked at")
        for path in (*parts, parts[0].parent):
            f = open_gguf(path)
            assert f.paths == tuple(parts)
            self.assert_is_tiny(f, tiny_dense, 3)
            assert {t.part for t in f.tensors.values()} == {0, 1, 2}

    def test_b40_first_part_without_tensors(self, tmp_path: Path, tiny_dense: Path) -> None:
        single = open_gguf(tiny_dense)
        first = write_gguf(
            tmp_path / "e.gguf", dict(single.metadata), tiny_tensors(TinySpec()), parts=3, empty_first=True
        )
        f = open_gguf(first)
        assert not [t for t in f.tensors.values() if t.part == 0]
        self.assert_is_tiny(f, tiny_dense, 3)

    def test_b40_missing_part(self, parts: list[Path]) -> None:
        parts[2].unlink()
        for path in (parts[0], parts[1], parts[0].parent):
            with pytest.raises(ModelFileError, match=r"missing.*tiny-00003-of-00003.gguf"):
                open_gguf(path)

    def rewrite(self, path: Path, **split: int) -> None:
        """Write one part again with other split keys."""
        part = Part(path, 0)
        tensors = {n: t.data.view(np.float32).reshape(t.shape[::-1]).copy() for n, t in part.tensors.items()}
        meta = dict(Metadata(part)) | {f"split.{k.replace('_', '.')}": v for k, v in split.items()}
        write_gguf(path, meta, tensors)

    def test_b40_disagreeing_count(self, parts: list[Path]) -> None:
        self.rewrite(parts[1], count=4)
        with pytest.raises(ModelFileError, match=r"tiny-00002-of-00003.gguf: key 'split.count' is 4"):
            open_gguf(parts[0])
        with pytest.raises(ModelFileError, match=r"tiny-00002-of-00003.gguf: part of a model split in 4"):
            open_gguf(parts[1])

    def test_b40_disagreeing_tensor_count(self, parts: list[Path]) -> None:
        self.rewrite(parts[2], tensors_count=5)
        with pytest.raises(ModelFileError, match=r"tiny-00003-of-00003.gguf: key 'split.tensors.count' is 5"):
            open_gguf(parts[0])

    def test_b40_one_part_twice(self, parts: list[Path]) -> None:
        shutil.copy(parts[1], parts[2])
        with pytest.raises(ModelFileError, match=r"tiny-00003-of-00003.gguf: holds part 2 .* part 3 is needed"):
            open_gguf(parts[0])
        shutil.copy(parts[1], parts[0])
        with pytest.raises(ModelFileError, match=r"tiny-00001-of-00003.gguf: holds part 2 .* part 1 is needed"):
            open_gguf(parts[0])

    def test_b40_same_tensor_in_two_parts(self, parts: list[Path]) -> None:
        shutil.copy(parts[1], parts[2])
        self.rewrite(parts[2], no=2)
        with pytest.raises(ModelFileError, match=r"tiny-00003-of-00003.gguf: tensor '.*' is also in tiny-00002"):
            open_gguf(parts[0])

    @pytest.mark.parametrize("name", ["other.gguf", "tiny-00001-of-00004.gguf"])
    def test_b40_renamed_part(self, parts: list[Path], name: str) -> None:
        with pytest.raises(ModelFileError, match=r"must keep its name"):
            open_gguf(parts[0].rename(parts[0].with_name(name)))

    @pytest.mark.parametrize(("key", "value"), [("split.count", 0), ("split.count", "3"), ("split.no", 7)])
    def test_b40_impossible_values(self, tmp_path: Path, key: str, value: Any) -> None:
        meta = {"split.count": 2, "split.no": 0} | {key: value}
        for i in (1, 2):
            write_gguf(tmp_path / f"x-{i:05d}-of-00002.gguf", meta, {})
        with pytest.raises(ModelFileError, match=key):
            open_gguf(tmp_path / "x-00001-of-00002.gguf")

    def test_folder_with_no_model_or_several(self, tmp_path: Path, tiny_dense: Path) -> None:
        with pytest.raises(ModelFileError, match=r"no GGUF model"):
            open_gguf(tmp_path)
        shutil.copy(tiny_dense, tmp_path / "a.gguf")
        assert open_gguf(tmp_path).path.name == "a.gguf"
        shutil.copy(tiny_dense, tmp_path / "b.gguf")
        with pytest.raises(ModelFileError, match=r"2 models: a\.gguf, b\.gguf"):
            open_gguf(tmp_path)

    def test_one_part_alone_is_a_whole_model(self, tmp_path: Path) -> None:
        meta = tiny_metadata(TinySpec(), None, None) | {"split.no": 0, "split.count": 1}
        assert len(open_gguf(write_gguf(tmp_path / "one.gguf", meta, {})).paths) == 1

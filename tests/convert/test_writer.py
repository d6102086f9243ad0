"""GGUF output: exact bytes, parts, and that nothing half-written ever has the final name."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType

from qwen35rt.convert.writer import GgufOutput, TensorPlan, Typed
from qwen35rt.errors import ConfigError, Qwen35Error
from qwen35rt.formats import BY_NAME
from qwen35rt.model.gguf_file import open_gguf

META: dict[str, Any] = {
    "general.architecture": "test",
    "a.u32": 7,
    "a.negative": -7,
    "a.f32": 1e-6,
    "a.bool": False,
    "a.text": "wörld",
    "a.empty": "",
    "a.ints": [3, 2, 1, 0],
    "a.bools": [True, False],
    "a.texts": ["x", "", "y z"],
    "a.i32": Typed(20, GGUFValueType.INT32),
    "a.u64": Typed(2**40, GGUFValueType.UINT64),
    "a.f64s": Typed([0.1], GGUFValueType.ARRAY, GGUFValueType.FLOAT64),
}
PLANS = [
    TensorPlan("a", (3, 64), BY_NAME["F32"]),
    TensorPlan("b", (5,), BY_NAME["F32"]),
    TensorPlan("c", (2, 4, 32), BY_NAME["Q8_0"]),
    TensorPlan("d", (2, 33), BY_NAME["BF16"]),
]
DATA: list[np.ndarray[Any, Any]] = [
    np.arange(192, dtype=np.float32).reshape(3, 64),
    np.arange(5, dtype=np.float32),
    np.arange(272, dtype=np.uint32).astype(np.uint8),
    np.arange(66, dtype=np.uint16),
]


def write_all(output: GgufOutput) -> None:
    for plan, data in zip(PLANS, DATA, strict=True):
        output.write(plan.name, data)


def write_more(output: GgufOutput) -> None:
    write_all(output)
    output.write("e", DATA[1])


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize(("most", "parts"), [(None, 1), (10**9, 1), (1088, 2), (450, 3), (1, 4)])
def test_what_is_written_is_read_again(tmp_path: Path, most: int | None, parts: int) -> None:
    """768 + 32 + 288 + 160 bytes with padding; a part holds at least one tensor."""
    with GgufOutput(tmp_path / "o.gguf", META, PLANS, most) as output:
        write_all(output)
    single = ["o.gguf"]
    split = [f"o-{i + 1:05d}-of-{parts:05d}.gguf" for i in range(parts)]
    assert names(tmp_path) == [p.name for p in output.paths] == (single if parts == 1 else split)
    with open_gguf(output.paths[-1]) as f:
        assert {n: t.shape[::-1] for n, t in f.tensors.items()} == {p.name: p.shape for p in PLANS}
        for plan, data in zip(PLANS, DATA, strict=True):
            assert f.tensors[plan.name].format == plan.format
            assert bytes(f.tensors[plan.name].data) == data.tobytes()
        plain = {k: v.value if isinstance(v, Typed) else v for k, v in META.items()}
        got = {k: f.metadata[k] for k in f.metadata if not k.startswith("split.")}
        assert got == plain | {"a.f32": float(np.float32(1e-6))}
    types = {f.name: [t.name for t in f.types] for f in GGUFReader(output.paths[0]).fields.values()}
    assert types["a.u32"] == ["UINT32"]
    assert types["a.negative"] == types["a.i32"] == ["INT32"]
    assert types["a.f32"] == ["FLOAT32"]
    assert types["a.bool"] == ["BOOL"]
    assert types["a.ints"] == ["ARRAY", "INT32"]
    assert types["a.bools"] == ["ARRAY", "BOOL"]
    assert types["a.u64"] == ["UINT64"]
    if parts > 1:
        assert types["split.no"] == types["split.count"] == ["UINT16"]
        assert types["split.tensors.count"] == ["INT32"]


def test_pieces_make_a_tensor_and_stale_split_keys_are_dropped(tmp_path: Path) -> None:
    keys = META | {"split.no": 4, "split.count": 9, "general.alignment": 64}
    with GgufOutput(tmp_path / "o.gguf", keys, PLANS) as output:
        output.write("a", (row for row in DATA[0]))
        for plan, data in zip(PLANS[1:], DATA[1:], strict=True):
            output.write(plan.name, iter(np.split(data, [1, 4])))
    with open_gguf(tmp_path / "o.gguf") as f:
        assert all(bytes(f.tensors[p.name].data) == d.tobytes() for p, d in zip(PLANS, DATA, strict=True))
        assert "split.count" not in f.metadata
        assert f.metadata["general.alignment"] == 64


WRONG: dict[str, tuple[Callable[[GgufOutput], None], str]] = {
    "order": (lambda o: o.write("b", DATA[1]), "'b' was written where 'a' is next"),
    "short": (lambda o: o.write("a", DATA[0][:2]), "takes 768 bytes and was given 512"),
    "long": (lambda o: o.write("a", iter([DATA[0], DATA[0]])), "takes 768 bytes and was given 1536 or more"),
    "dtype": (lambda o: o.write("a", DATA[0].astype(np.float64)), "is F32 and was given float64"),
    "missing": (lambda o: o.write("a", DATA[0]), "'b' and those after it were not written"),
    "more": (lambda o: write_more(o), "one more than the 4"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("most", [None, 800])
def test_wrong_calls_leave_nothing(tmp_path: Path, case: str, most: int | None) -> None:
    act, message = WRONG[case]
    (tmp_path / "o.gguf").write_bytes(b"before")
    with pytest.raises(ValueError, match=message), GgufOutput(tmp_path / "o.gguf", META, PLANS, most) as output:
        act(output)
    assert names(tmp_path) == ["o.gguf"]
    assert (tmp_path / "o.gguf").read_bytes() == b"before"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_errors_of_the_caller_leave_nothing(tmp_path: Path, error: type[BaseException]) -> None:

    def write() -> None:
        with GgufOutput(tmp_path / "o.gguf", META, PLANS, 1) as output:
            output.write("a", DATA[0])
            assert len(names(tmp_path)) == 4
            assert all(n.startswith(".o-0000") and n.endswith(".partial") for n in names(tmp_path))
            raise error

    with pytest.raises(error):
        write()
    assert names(tmp_path) == []


def test_an_existing_file_is_replaced_only_at_the_end(tmp_path: Path) -> None:
    """Through a link the file that it points to."""
    (tmp_path / "real.gguf").write_bytes(b"before")
    (tmp_path / "o.gguf").symlink_to("real.gguf")
    with GgufOutput(tmp_path / "o.gguf", META, PLANS) as output:
        write_all(output)
        assert (tmp_path / "o.gguf").read_bytes() == b"before"
    assert (tmp_path / "o.gguf").is_symlink()
    assert open_gguf(tmp_path / "real.gguf").metadata["a.u32"] == 7


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    source = tmp_path / "in.safetensors"
    source.write_bytes(b"weights")
    (tmp_path / "link.gguf").symlink_to(source)
    wrong: Sequence[tuple[Path, str]] = (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "o.gguf", "does not exist"),
        (source, "also an input"),
        (tmp_path / "link.gguf", "also an input"),
        (Path("/dev/null"), "not a regular file"),
    )
    for path, message in wrong:
        with pytest.raises(ConfigError, match=message):
            GgufOutput(path, META, PLANS, inputs=[source])
    assert source.read_bytes() == b"weights"
    assert names(tmp_path) == ["in.safetensors", "link.gguf"]


def test_a_disk_without_room_is_found_before_anything_is_written(tmp_path: Path) -> None:
    plan = TensorPlan("a", (1 << 20, 1 << 20), BY_NAME["F32"])
    with (
        pytest.raises(Qwen35Error, match=r"o\.gguf: the file needs 43980\d+ bytes .* are free"),
        GgufOutput(tmp_path / "o.gguf", META, [plan]),
    ):
        raise AssertionError
    assert names(tmp_path) == []


@pytest.mark.parametrize("when", ["write", "close"])
def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    (tmp_path / "o.gguf").write_bytes(b"before")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def write() -> None:
        with GgufOutput(tmp_path / "o.gguf", META, PLANS) as output:
            if when == "write":
                output._files[0] = cast(BinaryIO, _Full(output._files[0]))
            else:
                monkeypatch.setattr(os, "fsync", full)
            write_all(output)

    with pytest.raises(Qwen35Error, match=r"o\.gguf: the file needs \d+ bytes .*No space left on device"):
        write()
    assert names(tmp_path) == ["o.gguf"]
    assert (tmp_path / "o.gguf").read_bytes() == b"before"


class _Full:
    """A file on a full disk."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        self.file.close()


_LIMITED = """
import sys
from pathlib import Path
import numpy as np
from qwen35rt.convert.writer import GgufOutput, TensorPlan
from qwen35rt.errors import Qwen35Error
from qwen35rt.formats import BY_NAME
plans = [TensorPlan(f"t{i}", (1024, 1024), BY_NAME["F32"]) for i in range(4)]
try:
    with GgufOutput(sys.argv[1], {"general.architecture": "test"}, plans) as output:
        for plan in plans:
            output.write(plan.name, np.zeros(plan.shape, np.float32))
except Qwen35Error as e:
    print(e)
"""


def test_a_real_limit_on_file_sizes(tmp_path: Path) -> None:
    """The system refuses to write on: 10 MB are allowed, 16 MiB needed."""
    limit = 10_000_000
    run = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path / "o.gguf")],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        check=False,
    )
    assert "o.gguf: the file needs 1677" in run.stdout, run.stderr
    assert "File too large" in run.stdout
    assert names(tmp_path) == []


def test_plans_that_make_no_file(tmp_path: Path) -> None:
    plans = {
        "declared twice": [PLANS[0], PLANS[0]],
        "has the shape": [TensorPlan("a", (), BY_NAME["F32"])],
        "needs multiples of 32": [TensorPlan("a", (4, 33), BY_NAME["Q8_0"])],
    }
    for message, wrong in plans.items():
        with pytest.raises(ValueError, match=message):
            GgufOutput(tmp_path / "o.gguf", META, wrong)
    many = [TensorPlan(f"t{i}", (8,), BY_NAME["F32"]) for i in range(1025)]
    with pytest.raises(ConfigError, match="at most 1024"):
        GgufOutput(tmp_path / "o.gguf", META, many, 1)

"""Files that lie, are cut or are something else: a typed error that says what is wrong, soon and in little memory."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35rt.errors import ModelFileError
from qwen35rt.model.gguf_file import open_gguf
from qwen35rt.model.hparams import read_hparams
from qwen35rt.model.weights import load_weights
from tests import gguf_raw as raw
from tests.fixtures import write_tiny

F32, Q4_K = 0, 12
U32, F32_VALUE, STRING, ARRAY = 4, 6, 8, 9
MODEL = [raw.string_key("general.architecture", "qwen35")]


def one_tensor(dims: list[int], kind: int = F32, offset: int = 0, n_dims: int | None = None) -> bytes:
    return raw.file(MODEL, [raw.tensor("big", dims, kind, offset, n_dims)], bytes(64))


def aligned(kind: int, value: bytes) -> bytes:
    return raw.file([*MODEL, raw.key("general.alignment", kind, value)], [raw.tensor("t", [4])], bytes(64))


def nested(depth: int) -> bytes:
    return raw.file([raw.key("deep", ARRAY, struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", U32, 0))])


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


# name: (the file, words of the message)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "b34 dims 1 0": (one_tensor([1, 0]), "tensor 'big' has a dimension of 0"),
    "b34 dims 0": (one_tensor([0]), "tensor 'big' has a dimension of 0"),
    "b34 empty key": (raw.file([raw.key("", U32, u32(1))]), "name of key 1 of 1 is empty"),
    "empty tensor name": (raw.file([], [raw.tensor("", [1])], bytes(32)), "name of tensor 1 of 1 is empty"),
    **{
        f"b35 {dims} {kind}": (one_tensor(dims, kind), "tensor 'big'")
        for dims in ([2**63 - 1, 2], [2**32, 2**32], [2**62, 4], [3, 2**61], [2**62, 2**62, 2**62, 2**62])
        for kind in (F32, Q4_K)
    },
    "b35 rows of 256": (one_tensor([256, 2**60], Q4_K), "truncated or damaged: tensor 'big'"),
    "b35 offset": (one_tensor([4], offset=2**64 - 32), "truncated or damaged: tensor 'big'"),
    "b35 offset unaligned": (one_tensor([4], offset=4), "'big' has the offset 4"),
    "b35 alignment 0": (aligned(U32, u32(0)), "'general.alignment' is 0"),
    "b35 alignment 3": (aligned(U32, u32(3)), "'general.alignment' is 3"),
    "b35 alignment 24": (aligned(U32, u32(24)), "'general.alignment' is 24"),
    "b35 alignment 2^31": (aligned(U32, u32(2**31)), "'general.alignment' is 2147483648"),
    "b35 alignment text": (aligned(STRING, raw.text("32")), "'general.alignment' is '32'"),
    "b35 alignment float": (aligned(F32_VALUE, struct.pack("<f", 32)), "'general.alignment' is 32.0"),
    "b35 alignment true": (aligned(7, b"\1"), "'general.alignment' is True"),
    "b35 alignment array": (aligned(ARRAY, struct.pack("<IQI", U32, 1, 32)), "'general.alignment' is an array"),
    "b36 n_dims 0": (one_tensor([], n_dims=0), "'big' states 0 dimensions"),
    "b36 n_dims 5": (one_tensor([1] * 5), "'big' states 5 dimensions"),
    "b36 n_dims 10^6": (one_tensor([1], n_dims=10**6), "'big' states 1000000 dimensions"),
    "b36 n_dims 2^32-1": (one_tensor([1], n_dims=2**32 - 1), "'big' states 4294967295 dimensions"),
    "b36 n_kv 2^63": (raw.file(MODEL, n_keys=2**63), "states 9223372036854775808 keys"),
    "b36 n_kv 60000": (raw.file(MODEL, n_keys=60_000), "truncated or damaged: a header that states 60000 keys"),
    "b36 n_tensors 2^40": (raw.file(MODEL, n_tensors=2**40), "states 1099511627776 tensors"),
    "b36 n_tensors 10^6": (raw.file(MODEL, n_tensors=10**6), "truncated or damaged: a header that states 1000000"),
    "b36 string": (raw.file([raw.key("s", STRING, struct.pack("<Q", 2**63) + b"x")]), "key 's' needs"),
    "b36 key": (raw.file([struct.pack("<Q", 2**63) + b"x" * 40]), "key 1 of 1 states a length of 9223372036854775808"),
    "b36 long key": (raw.file([raw.key("k" * 70_000, U32, u32(1))]), "states a length of 70000 bytes"),
    "b36 array": (raw.file([raw.array_key("a", U32, 2**61, bytes(64))]), "key 'a' needs"),
    "b36 array of strings": (
        raw.file([raw.array_key("a", STRING, 2**61, bytes(64))]),
        "key 'a' with 2305843009213693952",
    ),
    "b36 string in array": (
        raw.file([raw.array_key("a", STRING, 3, raw.text("x") + struct.pack("<Q", 2**63) + bytes(99))]),
        "key 'a' needs",
    ),
    "b36 last string in array": (
        raw.file([raw.array_key("a", STRING, 2, raw.text("x") + struct.pack("<Q", 2**40))]),
        "key 'a' needs",
    ),
    "b36 nested": (nested(1), "key 'deep' is an array of arrays"),
    "b36 nested 10,000": (nested(10_000), "key 'deep' is an array of arrays"),
    "b36 duplicate key": (raw.file([raw.u32_key("k", 1), raw.u32_key("k", 1)]), "key 'k' is there twice"),
    "b36 duplicate tensor": (
        raw.file([], [raw.tensor("t", [4], offset=o) for o in (0, 32)], bytes(64)),
        "tensor 't' is there twice",
    ),
    "b36 overlap": (
        raw.file([], [raw.tensor("a", [9]), raw.tensor("b", [8], offset=32)], bytes(128)),
        "tensors 'a' and 'b' overlap",
    ),
    "b36 same place": (
        raw.file([], [raw.tensor("a", [8]), raw.tensor("b", [8])], bytes(128)),
        "tensors 'a' and 'b' overlap",
    ),
    "value type": (raw.file([raw.key("k", 13, u32(0))]), "key 'k' has the unknown value type 13"),
    "array value type": (
        raw.file([raw.array_key("k", 99, 1, u32(0))]),
        "key 'k' is an array of the unknown value type 99",
    ),
    "bool": (raw.file([raw.key("k", 7, b"\2")]), "key 'k' is of type bool and holds 2"),
    "tensor type": (one_tensor([32], 77), "tensor 'big' has the unknown type 77"),
    "tensor type I8": (one_tensor([32], 24), r"tensor 'big' has the unsupported type 24 (I8)"),
    "key not utf-8": (raw.file([raw.key(b"\xff\xfe", U32, u32(1))]), "name of key 1 of 1 is not valid UTF-8"),
    "string not utf-8": (raw.file([raw.key("k", STRING, raw.text(b"\xff"))]), "key 'k' is not valid UTF-8"),
    "name not utf-8": (raw.file([], [raw.tensor(b"\x80", [4])], bytes(64)), "tensor 1 of 1 is not valid UTF-8"),
    "b31 Q4_K of 96": (
        one_tensor([96, 4], Q4_K),
        "'big' is Q4_K with rows of 96 elements; Q4_K needs a multiple of 256",
    ),
    "version 1": (raw.file(MODEL, version=1), "GGUF version 1 is not supported; versions 2 and 3 are"),
    "version 4": (raw.file(MODEL, version=4), "GGUF version 4 is not supported"),
    "big-endian": (raw.file(MODEL, version=3 << 24), "big-endian GGUF"),
    "b37 empty": (b"", "it is empty (0 bytes); a header takes 24"),
    "b37 html": (b"<!DOCTYPE html><html><body>404</body></html>", "an HTML or XML page, as a failed download"),
    "b37 zeros": (
        bytes(5000),
        "not a GGUF file: it starts with zeros, as an unfinished download does; the file has 5000",
    ),
    "safetensors": (struct.pack("<Q", 99) + b'{"a":{}}' + bytes(99), "a safetensors file"),
    "json": (b'{"error":"not found"}', "JSON text"),
    "zip": (b"PK\x03\x04" + bytes(99), "a PyTorch checkpoint"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    "ggml": (b"tjgg" + bytes(99), "an old GGJT file"),
    "noise": (b"\x93NUMPY" + bytes(99), "not a GGUF file: it starts with b'\\x93NUMPY"),
}

CHILD = """
import json, pathlib, sys, time
from qwen35rt.errors import ModelFileError
from qwen35rt.model.gguf_file import open_gguf
folder, results = pathlib.Path(sys.argv[1]), {}
# ru_maxrss starts with that of the parent and would hide what this process takes.
peak = lambda: int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
for path in sorted(folder.glob("*.gguf")):
    before, start = peak(), time.perf_counter()
    try:
        dict(open_gguf(path).metadata)
        message = ""
    except ModelFileError as e:
        message = str(e)
    results[path.stem] = (message, time.perf_counter() - start, (peak() - before) * 1024)
print(json.dumps(results))
"""
EXIT_CHILD = """
import sys
from qwen35rt.errors import ModelFileError
from qwen35rt.model.gguf_file import open_gguf
try:
    open_gguf(sys.argv[1])
except ModelFileError as e:
    sys.exit(str(e))
"""


def child(code: str, *args: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Message, seconds and growth of the peak memory in bytes for each hostile file, from one child process."""
    folder = tmp_path_factory.mktemp("hostile")
    for i, (content, _) in enumerate(HOSTILE.values()):
        (folder / f"{i}.gguf").write_bytes(content)
    done = child(CHILD, folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {name: found[str(i)] for i, name in enumerate(HOSTILE)}


@pytest.mark.parametrize("name", HOSTILE)
def test_b34_b35_b36_b37_hostile_files(outcomes: dict[str, Any], name: str) -> None:
    message, seconds, growth = outcomes[name]
    assert HOSTILE[name][1] in message
    assert ".gguf: " in message
    assert len(message) < 500
    assert seconds < 1
    assert growth < 20 << 20


@pytest.mark.parametrize("name", [n for n in HOSTILE if n.startswith("b34")])
def test_b34_exit_code_and_message(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(HOSTILE[name][0])
    done = child(EXIT_CHILD, path)
    assert 1 <= done.returncode <= 63
    assert HOSTILE[name][1] in done.stderr
    assert "Traceback" not in done.stderr


def test_the_hand_made_bytes_are_right_when_they_do_not_lie(tmp_path: Path) -> None:
    """The builder of the hostile files writes sound ones too, so that each is refused for the one fault it has."""
    keys = [
        *MODEL,
        raw.u32_key("n", 7),
        raw.array_key("a", STRING, 2, raw.text("x") + raw.text("yz")),
        raw.array_key("none", STRING, 0, b""),
        raw.key("general.alignment", U32, u32(64)),
    ]
    data = raw.numbers("f4", range(4)) + bytes(48) + raw.numbers("f4", [9])
    tensors = [raw.tensor("late", [1], offset=64), raw.tensor("early", [2, 2])]
    for version in (2, 3):
        path = tmp_path / f"v{version}.gguf"
        path.write_bytes(raw.file(keys, tensors, data, version=version, alignment=64))
        f = open_gguf(path)
        assert f.metadata["n"] == 7
        assert f.metadata["a"] == ["x", "yz"]
        assert f.metadata["none"] == []
        assert f.tensors["late"].data.view(np.float32).tolist() == [9]
        assert f.tensors["early"].data.view(np.float32).tolist() == [0, 1, 2, 3]
        assert f.tensors["early"].shape == (2, 2)


def test_strings_that_are_not_utf8_are_named_when_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw.file([raw.array_key("tokens", STRING, 2, raw.text("ok") + raw.text(b"\xc3\x28"))]))
    f = open_gguf(path)
    with pytest.raises(ModelFileError, match=r"x.gguf: key 'tokens', string 1 is not valid UTF-8"):
        f.metadata["tokens"]
    path.write_bytes(raw.file([raw.array_key("flags", 7, 2, b"\1\5")]))
    with pytest.raises(ModelFileError, match=r"key 'flags' is an array of bool and holds 5"):
        open_gguf(path).metadata["flags"]


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        open_gguf(tmp_path / "absent.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        open_gguf(tmp_path / "pipe.gguf")


class TestTruncated:
    """B37: TINY-D cut short."""

    def cuts(self, path: Path) -> dict[str, int]:
        f = open_gguf(path)
        base = min(t.data.ctypes.data for t in f.tensors.values())
        data_bytes = max(t.data.ctypes.data + t.nbytes for t in f.tensors.values()) - base
        header = f.file_bytes - data_bytes
        header -= header % 32
        return {
            "3 bytes": 3,
            "4 bytes": 4,
            "23 bytes": 23,
            "24 bytes": 24,
            "a key": 200,
            "tokens": 3000,
            "tensor table": header - 300,
            "no data": header,
            "half": f.file_bytes // 2,
            "last tensor": self.last_byte(f),
        }

    def last_byte(self, f: Any) -> int:
        first = next(iter(f.tensors.values()))
        start = bytes(f.path.read_bytes()).find(first.data.tobytes())
        ends = [start + t.data.ctypes.data - first.data.ctypes.data + t.nbytes for t in f.tensors.values()]
        return int(max(ends)) - 1

    def test_b37_cut_anywhere(self, tiny_dense: Path, tmp_path: Path) -> None:
        whole, path = tiny_dense.read_bytes(), tmp_path / "cut.gguf"
        cuts = self.cuts(tiny_dense)
        assert cuts["tensor table"] > 5000
        for what, n in cuts.items():
            path.write_bytes(whole[:n])
            with pytest.raises(
                ModelFileError, match=rf"cut\.gguf: truncated.* needs \d+ bytes, the file has {n}$"
            ) as e:
                open_gguf(path)
            needed = int(str(e.value).split("needs ")[1].split()[0])
            assert n < needed <= len(whole), what
        path.write_bytes(whole[: cuts["last tensor"]])
        with pytest.raises(ModelFileError, match=rf"tensor '[a-z0-9_.]+' of .*needs {cuts['last tensor'] + 1} bytes"):
            open_gguf(path)
        path.write_bytes(whole[: cuts["last tensor"] + 1])
        open_gguf(path)

    def test_b37_every_cut_of_the_header(self, tiny_dense: Path, tmp_path: Path) -> None:
        """Any length: a typed error. Lengths beyond the tensor table are few; the table itself is tried in steps."""
        whole, path = tiny_dense.read_bytes(), tmp_path / "cut.gguf"
        header = self.cuts(tiny_dense)["no data"]
        for n in [*range(1, 400), *range(400, header, 37)]:
            path.write_bytes(whole[:n])
            with pytest.raises(ModelFileError, match="truncated"):
                open_gguf(path)


def load_all(path: Path) -> None:
    """Everything that looks at the file before a backend does."""
    f = open_gguf(path)
    hp = read_hparams(f)
    load_weights(f, hp)
    dict(f.metadata)


def flip(path: Path, rounds: int, seed: int, load: Callable[[Path], None]) -> tuple[int, int]:
    """Flip random bytes, one to three at a time, two in three within the header; -> loads that worked and refusals."""
    whole = path.read_bytes()
    header = whole.rfind(b".weight") + 64
    rng, worked = np.random.default_rng(seed), 0
    with path.open("r+b", buffering=0) as file:
        for i in range(rounds):
            places = rng.integers(0, header if i % 3 else len(whole), rng.integers(1, 4))
            for at in places:
                os.pwrite(file.fileno(), bytes([whole[at] ^ int(rng.integers(1, 256))]), at)
            try:
                load(path)
                worked += 1
            except ModelFileError:
                pass
            for at in places:
                os.pwrite(file.fileno(), whole[at : at + 1], at)
    return worked, rounds - worked


def test_b36_flipped_bytes(tmp_path: Path) -> None:
    """2,000 damaged copies of TINY-D: each is a typed error or loads; anything else fails or ends the process."""
    worked, refused = flip(write_tiny(tmp_path / "t.gguf"), 2_000, 36, load_all)
    assert worked > 200
    assert refused > 200


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_b36_flipped_bytes_long(tmp_path: Path, kind: str) -> None:
    worked, refused = flip(write_tiny(tmp_path / "t.gguf", kind, mtp=True), 20_000, 37, load_all)
    assert worked > 2_000
    assert refused > 2_000

"""All kernels at every instruction level, those that this machine lacks included (B30, B88): see levels.c.

AVX-512 is built on AVX2 by SIMDe, AArch64 by a cross compiler and run by qemu's user mode; scalar and AVX2 under
sanitizers too, without the optimiser, which would take its time with the checks. What is missing is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from qwen35rt.cpu_count import usable_cpus
from tests.implementations import isa_levels

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "kernels"
PARTS = ("rows", "state", "linear")  # of the driver, which can be run alone
SHARED = (ROOT / "csrc" / "threadpool.c", *(HERE / f"levels_{part}.c" for part in PARTS))  # the same for all levels
KERNELS = ("linear", "attention", "dequantize", "norms", "rows", "delta_net")  # the longest to compile first
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
NATIVE = {"scalar": (), "avx2": AVX2, "avx512": AVX512, "avx512bf16": (*AVX512, "-mavx512bf16")}
SIMDE = (*AVX2, "-DQRT_SIMDE", "-DSIMDE_ENABLE_NATIVE_ALIASES", "-O0")
NEON = "-march=armv8.2-a+dotprod+fp16"
# The longest first.
CHECKS = ("neon", "sanitized-avx2", "sanitized-scalar", "simde", *(f"native-{level}" for level in NATIVE))
SANITIZE = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1")
ARM_CC, ARM_LIBRARIES = "aarch64-linux-gnu-gcc", "/usr/aarch64-linux-gnu"


def at_once(calls: Iterable[Callable[[], None]]) -> None:
    """Wait for calls that spend their time in other processes, as many at once as there are cores."""
    behind = threading.current_thread() is not threading.main_thread()
    with ThreadPoolExecutor(max(1, usable_cpus().affinity - behind)) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()


_children: set[subprocess.Popen[str]] = set()
_ending = threading.Event()


def call(*command: str | Path) -> tuple[int, str]:
    """Run a program: -> its status, and what it says."""
    if _ending.is_set():
        raise InterruptedError("the session ends")
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    _children.add(child)
    said, _ = child.communicate()
    _children.discard(child)
    return child.returncode, said


@dataclass(frozen=True)
class Compiler:
    """Compiles kernels and the driver into a folder; objects are made once."""

    folder: Path
    cc: str = "gcc"
    flags: tuple[str, ...] = ("-O0",)

    def run(self, *args: str | Path) -> None:
        """One call."""
        common = ("-std=gnu11", "-ffp-contract=off")
        status, said = call(self.cc, *common, *self.flags, f"-I{ROOT / 'csrc'}", *args)
        assert status == 0, said[-4000:]

    def objects(self, levels: Mapping[str, Sequence[str]]) -> list[Path]:
        """The kernels of levels, each with flags of its own."""
        sources: dict[Path, Sequence[str | Path]] = {}
        for level, flags in levels.items():
            define = (f"-DQRT_LEVEL={level}", f"-DQRT_LEVEL_{level.upper()}=1")
            for name in KERNELS:
                given: list[str | Path] = [*flags, *define, ROOT / "csrc" / "kernels" / f"{name}.c"]
                sources[self.folder / f"{level}-{name}.o"] = given
        return self._compile(sources)

    def driver(self, level: str, flags: Sequence[str] = (), kernels: Sequence[Path] = ()) -> Path:
        """The program that compares a level; ``kernels``: its objects, where they come from elsewhere."""
        levels = {"scalar": ()} if level == "scalar" or kernels else {"scalar": (), level: flags}
        objects = [*self.objects(levels), *kernels]
        strict = ("-Wall", "-Wextra", "-Werror")
        sources: dict[Path, Sequence[str | Path]]
        sources = {self.folder / f"{path.stem}.o": (*strict, path) for path in SHARED}
        sources[self.folder / f"levels-{level}.o"] = (*strict, f"-DLEVEL={level}", HERE / "levels.c")
        program = self.folder / f"levels-{level}"
        self.run(*self._compile(sources), *objects, "-o", program, "-lm", "-lpthread")
        return program

    def _compile(self, sources: Mapping[Path, Sequence[str | Path]]) -> list[Path]:
        self.folder.mkdir(exist_ok=True)
        missing = [(path, given) for path, given in sources.items() if not path.exists()]
        at_once(partial(self.run, *given, "-c", "-o", path) for path, given in missing)
        return list(sources)


def passes(*command: str | Path) -> None:
    """Run a driver, its parts beside each other."""
    at_once(partial(_passes, *command, part) for part in PARTS)


def _passes(*command: str | Path) -> None:
    status, said = call(*command)
    assert status == 0, said[-4000:]
    assert said.endswith("0 failures\n")


def lacks(check: str) -> str | None:
    """Why a check cannot be made here; None if it can."""
    kind, _, level = check.partition("-")
    if not shutil.which("gcc"):
        return "no gcc"
    if kind == "neon":
        missing = [tool for tool in (ARM_CC, "qemu-aarch64") if not shutil.which(tool)]
        return f"no {missing[0]} (Debian packages gcc-aarch64-linux-gnu, qemu-user)" if missing else None
    if kind == "simde" and not Path("/usr/include/simde").is_dir():
        return "no /usr/include/simde (Debian package libsimde-dev)"
    needed = "avx2" if kind == "simde" else level  # the shims of simd/simde.h are written in it
    return None if needed in isa_levels() else f"{needed} cannot run on this machine, or the module is not built"


def make(check: str, folder: Path) -> None:
    """Build a level's driver in a folder and run it. Raises AssertionError."""
    kind, _, level = check.partition("-")
    if kind == "neon":
        program = Compiler(folder / "neon", ARM_CC, ("-O1",)).driver("neon", (NEON,))
        passes("qemu-aarch64", "-L", ARM_LIBRARIES, program)
    elif kind == "simde":
        kernels = Compiler(folder / "simde", flags=SIMDE).objects({"avx512": ()})
        passes(Compiler(folder / "native").driver("avx512", kernels=kernels))
    elif kind == "sanitized":
        passes(Compiler(folder / kind, flags=SANITIZE).driver(level, NATIVE[level]))
    else:
        passes(Compiler(folder / kind).driver(level, NATIVE[level]))


@pytest.mark.parametrize("check", CHECKS)
def test_level(check: str, begun: Begun) -> None:
    if reason := lacks(check):
        pytest.skip(reason)
    begun.end(check)


def test_avx512bf16_has_the_code_of_avx512() -> None:
    """So AVX-512 alone runs under SIMDe; code of its own would have to run there too."""
    for path in (ROOT / "csrc").rglob("*.[ch]"):
        text = path.read_text()
        both = text.count("defined(QRT_LEVEL_AVX512) || defined(QRT_LEVEL_AVX512BF16)")
        assert text.count("LEVEL_AVX512)") == text.count("LEVEL_AVX512BF16") == both, path


class Begun:
    """Checks that are made in the background, one after the other, on one core less than there are: they wait for
    compilers, most other tests for one core. ``end`` makes one at once that has not begun."""

    def __init__(self, checks: Sequence[str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="qwen35rt-levels-"))
        self._pool = ThreadPoolExecutor(1, initializer=partial(os.nice, 5))
        self._made = {check: self._pool.submit(make, check, self._folder) for check in checks}

    def end(self, check: str) -> None:
        """Wait until a check is made. Raises its AssertionError."""
        made = self._made.get(check)
        if made is None or made.cancel():
            make(check, self._folder)
        else:
            made.result()

    def close(self) -> None:
        """Begin no more, end what runs, and drop what was built."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        _ending.set()
        for child in list(_children):
            child.kill()
        self._pool.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

"""All kernels at every instruction level, those that this machine lacks included (B30, B88): see levels.c.

AVX-512 is built on AVX2 by SIMDe, AArch64 by a cross compiler and run by qemu's user mode; scalar and AVX2 under
sanitizers too, without the optimiser, which would take its time with the checks. What is missing is skipped.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from qwen35rt.cpu_count import usable_cpus
from tests import ahead
from tests.implementations import isa_levels

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "kernels"
PARTS = ("rows", "state", "linear")  # of the driver, which can be run alone
SHARED = (ROOT / "csrc" / "threadpool.c", *(HERE / f"levels_{part}.c" for part in PARTS))  # the same for all levels
KERNELS = ("linear", "direct", "attention", "dequantize", "norms", "rows", "delta_net")  # the longest to compile first
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


def call(*command: str | Path) -> tuple[int, str]:
    """Run a program: -> its status, and what it says."""
    done = ahead.run([*map(str, command)])
    return done.returncode, done.stdout + done.stderr


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

    def objects(self, levels: Mapping[str, Sequence[str]], kernels: Sequence[str] = KERNELS) -> list[Path]:
        """Kernels of levels, each with flags of its own."""
        sources: dict[Path, Sequence[str | Path]] = {}
        for level, flags in levels.items():
            define = (f"-DQRT_LEVEL={level}", f"-DQRT_LEVEL_{level.upper()}=1")
            for name in kernels:
                source = ROOT / "csrc" / "kernels" / f"{name}.c"
                sources[self.folder / f"{level}-{name}.o"] = (*flags, *define, str(source))
        return self._compile(sources)

    def driver(
        self, level: str, flags: Sequence[str] = (), kernels: Sequence[Path] = (), products: str | None = None
    ) -> Path:
        """The program that compares a level; ``kernels``: its objects, where they come from elsewhere. ``products``: of
        this level in place of its own."""
        levels: dict[str, Sequence[str]] = {"scalar": ()}
        if level != "scalar" and not kernels:
            levels[level] = flags
        define = [f"-DLEVEL={level}"]
        if products:
            define.append(f"-DABOVE={products}")
        if "avx512bf16" in (level, products):
            define.append("-DROUNDS_X")
        objects = [*self.objects(levels), *kernels]
        strict = ("-Wall", "-Wextra", "-Werror")
        sources: dict[Path, Sequence[str | Path]]
        sources = {self.folder / f"{path.stem}.o": (*strict, path) for path in SHARED}
        program = self.folder / "-".join(["levels", level, *([products] if products else [])])
        sources[program.with_suffix(".o")] = (*strict, *define, HERE / "levels.c")
        self.run(*self._compile(sources), *objects, "-o", program, "-lm", "-lpthread")
        return program

    def _compile(self, sources: Mapping[Path, Sequence[str | Path]]) -> list[Path]:
        self.folder.mkdir(exist_ok=True)
        missing = [(path, given) for path, given in sources.items() if not path.exists()]
        at_once(partial(self.run, *given, "-c", "-o", path) for path, given in missing)
        return list(sources)


def passes(*command: str | Path, parts: Sequence[str] = PARTS) -> None:
    """Run a driver, its parts beside each other."""
    at_once(partial(_passes, *command, part) for part in parts)


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
        simde = Compiler(folder / "simde", flags=SIMDE)
        kernels, native = simde.objects({"avx512": ()}), Compiler(folder / "native")
        passes(native.driver("avx512", kernels=kernels))
        kernels += simde.objects({"avx512bf16": ()}, ("linear",))
        passes(native.driver("avx512", kernels=kernels, products="avx512bf16"), parts=("linear",))
    elif kind == "sanitized":
        passes(Compiler(folder / kind, flags=SANITIZE).driver(level, NATIVE[level]))
    else:
        passes(Compiler(folder / kind).driver(level, NATIVE[level]))


def begin_ahead(chosen: list[pytest.Function]) -> list[pytest.Function]:
    waiting = []
    for item in chosen:
        if item.originalname == "test_level" and lacks(check := str(item.callspec.params["check"])) is None:
            waiting.append(item)
            ahead.begin(("level", check), partial(make, check, ahead.folder()))
    return waiting


@pytest.mark.parametrize("check", CHECKS)
def test_level(check: str) -> None:
    if reason := lacks(check):
        pytest.skip(reason)
    ahead.result(("level", check), partial(make, check, ahead.folder()))


def test_avx512bf16_differs_from_avx512_in_its_products() -> None:
    """So under SIMDe the rest runs as AVX-512 alone; other code of its own would have to run there too."""
    for path in (ROOT / "csrc").rglob("*.[ch]"):
        text = path.read_text()
        both = text.count("defined(QRT_LEVEL_AVX512) || defined(QRT_LEVEL_AVX512BF16)")
        own = text.count("LEVEL_AVX512BF16") - both
        assert text.count("LEVEL_AVX512)") == both, path
        assert not own or path.name in ("float_mul.h", "avx512.h"), path

"""All kernels at every instruction level, those that this machine lacks included (B30, B88): see levels.c.

AVX-512 is built on AVX2 by SIMDe, AArch64 by a cross compiler and run by qemu's user mode. What is missing is skipped.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.implementations import isa_levels

ROOT = Path(__file__).resolve().parents[2]
DRIVER = sorted((ROOT / "tests" / "kernels").glob("levels*.c"))
KERNELS = ("dequantize", "linear", "norms", "rows", "attention", "delta_net")  # linear takes most of the time
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
NATIVE = {"scalar": (), "avx2": AVX2, "avx512": AVX512, "avx512bf16": (*AVX512, "-mavx512bf16")}
SIMDE = (*AVX2, "-DQRT_SIMDE", "-DSIMDE_ENABLE_NATIVE_ALIASES", "-O0")
NEON = "-march=armv8.2-a+dotprod+fp16"
SANITIZE = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1")
ARM_CC, ARM_LIBRARIES = "aarch64-linux-gnu-gcc", "/usr/aarch64-linux-gnu"


@dataclass(frozen=True)
class Compiler:
    """Compiles kernels into a folder; objects are made once."""

    folder: Path
    cc: str = "gcc"
    flags: tuple[str, ...] = ("-O0",)

    def run(self, *args: str | Path) -> None:
        """One call."""
        common = ("-std=gnu11", "-ffp-contract=off")
        made = subprocess.run(
            [self.cc, *common, *self.flags, f"-I{ROOT / 'csrc'}", *args], capture_output=True, text=True
        )
        assert made.returncode == 0, made.stderr[-4000:]

    def objects(self, level: str, flags: Sequence[str] = ()) -> list[Path]:
        """The kernels of a level."""
        self.folder.mkdir(exist_ok=True)
        made = [self.folder / f"{level}-{name}.o" for name in KERNELS]
        define = (f"-DQRT_LEVEL={level}", f"-DQRT_LEVEL_{level.upper()}=1")
        for name, path in zip(KERNELS, made, strict=True):
            if not path.exists():
                self.run(*flags, *define, "-c", ROOT / "csrc" / "kernels" / f"{name}.c", "-o", path)
        return made

    def driver(self, level: str, flags: Sequence[str] = ()) -> Path:
        """The program that compares a level."""
        return self.link(level, self.objects(level, flags) if level != "scalar" else [])

    def link(self, level: str, objects: Sequence[Path]) -> Path:
        """The same with the level's objects from elsewhere."""
        objects = [*self.objects("scalar"), *objects]
        below: tuple[str, ...] = ()
        if level.startswith("avx512"):  # which uses the products of few rows of AVX2
            below = ("-DBELOW=avx2",)
            objects += self.objects("avx2", AVX2)
        program = self.folder / f"levels-{level}"
        pool = ROOT / "csrc" / "threadpool.c"
        strict = ("-Wall", "-Wextra", "-Werror")
        self.run(*strict, f"-DLEVEL={level}", *below, *DRIVER, pool, *objects, "-o", program, "-lm", "-lpthread")
        return program


def passes(*command: str | Path) -> None:
    """Run a driver."""
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    assert ran.stdout.endswith("0 failures\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    return tmp_path_factory.mktemp("levels")


@pytest.mark.parametrize("level", NATIVE)
def test_native(folder: Path, level: str) -> None:
    if level not in isa_levels():
        pytest.skip(f"{level} cannot run on this machine, or the compiled module is not built")
    passes(Compiler(folder / "native").driver(level, NATIVE[level]))


@pytest.mark.parametrize("level", ["scalar", "avx2"])
def test_sanitized(folder: Path, level: str) -> None:
    """No access outside an operand, no undefined arithmetic; the optimiser would take its time with the checks."""
    if level not in isa_levels():
        pytest.skip(f"{level} cannot run on this machine, or the compiled module is not built")
    passes(Compiler(folder / "sanitized", flags=SANITIZE).driver(level, NATIVE[level]))


@pytest.mark.parametrize("level", ["avx512", "avx512bf16"])
def test_simde(folder: Path, level: str) -> None:
    if not Path("/usr/include/simde").is_dir():
        pytest.skip("no /usr/include/simde (Debian package libsimde-dev)")
    if "avx2" not in isa_levels():
        pytest.skip("the shims of simd/simde.h need AVX2")
    objects = Compiler(folder / "simde", flags=SIMDE).objects(level)
    passes(Compiler(folder / "native").link(level, objects))


def test_neon(folder: Path) -> None:
    for tool in (ARM_CC, "qemu-aarch64"):
        if not shutil.which(tool):
            pytest.skip(f"no {tool} (Debian packages gcc-aarch64-linux-gnu, qemu-user)")
    program = Compiler(folder / "neon", ARM_CC, ("-O1",)).driver("neon", (NEON,))
    passes("qemu-aarch64", "-L", ARM_LIBRARIES, program)

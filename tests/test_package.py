"""The wheel: what is in it, where it may be installed, and that it runs there at every level of this machine."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from qwen35rt.config import environment

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "qwen35rt"
# What every manylinux system has. No C++ runtime and no OpenMP among them.
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
RUN_EVERY_LEVEL = """
import numpy, qwen35rt
from qwen35rt import _native

assert qwen35rt.__file__.startswith({prefix!r}), qwen35rt.__file__
assert _native.__file__.endswith("_native.abi3.so"), _native.__file__
want = None
for isa in _native.isa_levels():
    with qwen35rt.load(device="cpu", isa=isa, n_ctx=64) as model:
        got = model.logits(model.tokenize("Hello"))
    assert numpy.isfinite(got).all()
    want = got if want is None else want
    assert (got.argmax(1) == want.argmax(1)).all()
    print(isa)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that QWEN35RT_WHEEL names, else a fresh one (about a minute; needs the build tools of [dev])."""
    given = environment().wheel
    if given:
        return Path(given)
    missing = [n for n in ("scikit_build_core", "Cython", "ninja", "cmake") if importlib.util.find_spec(n) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (pip install 'qwen35rt[dev]'), and no QWEN35RT_WHEEL")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    # A build folder of its own: an editable install may be rebuilding in the usual one.
    command += [f"-Cbuild-dir={folder / 'build'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def contents(wheel: Path) -> set[str]:
    """Paths inside the wheel."""
    with zipfile.ZipFile(wheel) as z:
        return set(z.namelist())


@pytest.fixture(scope="module")
def library(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled module, taken out of the wheel."""
    with zipfile.ZipFile(wheel) as z:
        return Path(z.extract("qwen35rt/_native.abi3.so", tmp_path_factory.mktemp("library")))


def test_one_wheel_serves_every_python_from_3_11_on(wheel: Path) -> None:
    assert re.fullmatch(r"qwen35rt-[\d.]+-cp311-abi3-\w*linux\w*\.whl", wheel.name)


def test_wheel_holds_the_package_and_no_sources_of_it(contents: set[str]) -> None:
    inner = {n.removeprefix("qwen35rt/") for n in contents if n.startswith("qwen35rt/")}
    wanted = {p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py")}
    wanted |= {"_native.abi3.so", "_native.pyi", "py.typed", "data/embedded.gguf"}
    wanted |= {f"cuda/{p.name}" for p in (ROOT / "cuda").glob("*.cu*")}
    assert inner == wanted
    outside = {n.split("/")[0] for n in contents} - {"qwen35rt"}
    assert len(outside) == 1
    assert next(iter(outside)).endswith(".dist-info")
    assert any(n.endswith("/licenses/LICENSE") for n in contents)


def test_wheel_names_its_commands_and_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as z:
        (info,) = {n.split("/")[0] for n in z.namelist() if ".dist-info/" in n}
        metadata = z.read(f"{info}/METADATA").decode()
        commands = z.read(f"{info}/entry_points.txt").decode()
    assert "qwen35rt=qwen35rt.cli:main" in commands.replace(" ", "")
    assert "Requires-Python: >=3.11" in metadata
    needs = set(re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE))
    assert "numpy" in needs
    assert not needs & {"cython", "pytest", "cupy-cuda13x", "torch"}


def test_compiled_module_needs_the_c_library_only(library: Path) -> None:
    """Nor may a symbol of it be newer than what the manylinux tags know of."""
    shown = subprocess.run(
        ["readelf", "--wide", "--dynamic", "--version-info", str(library)], capture_output=True, text=True, check=True
    ).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", shown))
    assert needed
    assert needed <= SYSTEM_LIBRARIES
    versions = {(int(a), int(b)) for a, b in re.findall(r"Name: GLIBC_(\d+)\.(\d+)", shown)}
    assert versions
    assert max(versions) <= (2, 36)


def test_wheel_qualifies_for_a_manylinux_tag(wheel: Path) -> None:
    if importlib.util.find_spec("auditwheel") is None:
        pytest.skip("auditwheel is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True, check=True
    )
    assert re.search(r'platform\s+tag:\s+"manylinux_2_\d+_\w+"', done.stdout), done.stdout


def test_compiled_module_exports_its_start_only(library: Path) -> None:
    """Kernels of a higher level must not be found by anything in another library, nor the other way round."""
    shown = subprocess.run(
        ["readelf", "--wide", "--dyn-syms", str(library)], capture_output=True, text=True, check=True
    ).stdout
    defined = re.findall(r"(?:FUNC|OBJECT)\s+(?:GLOBAL|WEAK)\s+DEFAULT\s+\d+\s+(\w+)", shown)
    assert defined == ["PyInit__native"]


def test_installed_wheel_runs_at_every_level(wheel: Path, tmp_path: Path) -> None:
    """B88. The dependencies are this environment's, so that no network is needed; the package is the wheel's."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--disable-pip-version-check", str(wheel)], check=True, capture_output=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n" + sysconfig.get_path("platlib"))
    keep = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "QWEN35RT_ISA")}
    done = subprocess.run(
        [str(python), "-W", "error", "-c", RUN_EVERY_LEVEL.format(prefix=str(venv))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=keep,
    )
    assert done.returncode == 0, done.stderr
    assert "scalar" in done.stdout.split()

"""Rules of the code base that a reader relies on: who imports whom, who prints, sizes, and documents that stay true."""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import qwen35rt
from qwen35rt import config
from qwen35rt.cli import COMMANDS
from qwen35rt.formats import FORMATS

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "qwen35rt"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])

# Lowest first. A module imports from its own layer and from lower ones.
LAYERS = (
    ("config", "errors", "formats"),
    ("model", "tokenizer", "cpu_count"),
    ("backends",),
    ("engine", "plan"),
    ("device", "machine", "parts", "self_test"),
    ("api",),
    ("server",),
    ("cli", "bench", "convert", "__main__"),
)
ALONE = LAYERS[0]  # import nothing of ours
NATIVE_USERS = {
    "backends.cpu.backend": "runs steps",
    "backends.cpu.structs": "compares struct sizes",
    "engine.sampler": "draws tokens",
    "cli.doctor": "reports the levels",
    "bench.command": "measures the machine's peaks",
    "convert.rows": "quantises rows",
}
CUPY_USERS = {
    "backends.cuda": "opens the device",
    "backends.cuda.launch": "launches kernels",
    "machine": "reports its version and devices",
}
PRINTERS = ("cli", "bench")
LINES = {".py": 400, ".pyi": 400, ".c": 600, ".h": 600, ".cu": 600, ".cuh": 600, ".pyx": 500, ".pxi": 500}
LONGER: dict[str, str] = {}  # path from the root -> why it may be longer


def module_name(path: Path) -> str:
    """``backends.cpu.lower`` for a file below SOURCE; the package itself is the empty name."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(p): p for p in sorted(SOURCE.rglob("*.py"))}


@cache
def tree(name: str) -> ast.Module:
    """The parsed source of a module."""
    return ast.parse(MODULES[name].read_text())


def imported(name: str) -> Iterator[str]:
    """Full names of what a module imports, at its top or inside functions, ``qwen35rt.`` first for our own."""
    package = ["qwen35rt", *name.split(".")] if name else ["qwen35rt"]
    if MODULES[name].name != "__init__.py":
        package.pop()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            yield from (".".join([*base, a.name]) for a in node.names)


def own_imports(name: str) -> set[str]:
    """Our modules, from the package's root, that a module imports from."""
    found = set()
    for full in imported(name):
        if full.startswith("qwen35rt."):
            inner = full.removeprefix("qwen35rt.")
            found.add(inner if inner in MODULES else inner.rpartition(".")[0])
    return {n for n in found if n}


def layer(name: str) -> int:
    """Number of a module's layer."""
    return next(i for i, units in enumerate(LAYERS) if name.split(".")[0] in units)


@pytest.mark.parametrize("name", [n for n in MODULES if n])
def test_imports_point_one_way(name: str) -> None:
    others = own_imports(name) - {"_native"}
    if name in ALONE:
        assert not others
    assert {n for n in others if layer(n) > layer(name)} == set()


def test_every_module_has_a_layer() -> None:
    units = {n.split(".")[0] for n in MODULES if n}
    assert units <= {unit for units in LAYERS for unit in units}


def test_only_named_modules_import_native_code_and_cupy() -> None:
    native = {n for n in MODULES if any(f.startswith("qwen35rt._native") for f in imported(n))}
    cupy = {n for n in MODULES if any(f.split(".")[0] == "cupy" for f in imported(n))}
    assert native <= set(NATIVE_USERS)
    assert cupy <= set(CUPY_USERS)


def test_only_config_reads_the_environment() -> None:
    readers = {
        name
        for name in MODULES
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Attribute | ast.Name)
        and (node.attr if isinstance(node, ast.Attribute) else node.id) in ("environ", "getenv", "environb")
    }
    assert readers == {"config"}


def test_only_commands_print() -> None:
    printers = {
        name
        for name in MODULES
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert {n for n in printers if n.split(".")[0] not in PRINTERS} == set()
    # C answers with a status; only the caller knows where a text may go.
    for path in [*ROOT.glob("csrc/**/*.c"), *ROOT.glob("csrc/**/*.h")]:
        assert not re.search(r"\b(f?printf|puts|perror)\(", path.read_text()), path


def test_modules_say_what_they_own() -> None:
    silent = [n for n, path in MODULES.items() if path.read_text().strip() and not ast.get_docstring(tree(n))]
    assert silent == []


def test_files_stay_within_their_size() -> None:
    folders = ("src", "tests", "csrc", "cuda", "tools", "benchmarks")
    files = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in LINES]
    assert len(files) > 100
    long = {}
    for path in files:
        lines = len(path.read_text().splitlines())
        if lines > LINES[path.suffix]:
            long[path.relative_to(ROOT).as_posix()] = lines
    assert {name: n for name, n in long.items() if name not in LONGER} == {}
    assert set(LONGER) <= set(long), "an exception that nothing needs"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_files_named_in_documents_exist(document: Path) -> None:
    text = document.read_text()
    links = [t.split("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t]
    missing = [t for t in links if t and not (document.parent / t).exists()]
    paths = re.findall(r"`((?:src|csrc|cuda|tests|docs|tools|benchmarks|\.ci)/[\w./*-]*|CMakeLists\.txt)`", text)
    # Kernels for CUDA are announced before they are there.
    missing += [p for p in paths if p != "cuda/" and not list(ROOT.glob(p.rstrip("/")))]
    assert missing == []


def test_commands_of_the_readme_are_those_of_ci() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    steps = [step.strip() for block in blocks[:2] for step in block.split("&&")]
    assert len(steps) == 6
    for step in steps:
        assert any(line.removeprefix("OPENBLAS_NUM_THREADS=1 ").startswith(step) for line in script), step


def test_readme_lists_commands_formats_and_variables() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^\| `([a-z]+)` \| ", readme, re.MULTILINE) == list(COMMANDS)
    (row,) = re.findall(r"^\| weight formats \| (.*)$", readme, re.MULTILINE)
    assert set(re.findall(r"[A-Z0-9]+(?:_[A-Z0-9]+)*", row)) - {"F"} == {f.name for f in FORMATS}
    names = {f"QWEN35RT_{f.name.upper()}" for f in dataclasses.fields(config.Environment)}
    assert set(re.findall(r"^\| `(QWEN35RT_\w+)` \|", readme, re.MULTILINE)) == names


def test_every_field_of_config_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    classes = [c for c in vars(config).values() if isinstance(c, type) and dataclasses.is_dataclass(c)]
    assert set(sections) == {c.__name__ for c in classes}
    for c in classes:
        rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) \|", sections[c.__name__], re.MULTILINE))
        wanted = {f.name: f for f in dataclasses.fields(c)}
        assert set(rows) == set(wanted), c.__name__
        for name, written in rows.items():
            if c is config.Environment:
                assert written == f"`QWEN35RT_{name.upper()}`"
            else:
                assert ast.literal_eval(written.replace(",", "")) == wanted[name].default, name


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == qwen35rt.__version__
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == qwen35rt.__version__

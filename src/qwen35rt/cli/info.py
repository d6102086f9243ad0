"""``qwen35rt info``: a model file's metadata and tensors. Reads headers only, and any architecture's file."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from .parser import add_model_arguments, filled

if TYPE_CHECKING:
    from ..model.gguf_file import GgufFile

_SHOWN = 6  # entries of an array
_TEXT = 100  # characters of a text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("file", nargs="?", type=filled, metavar="PATH", help="the file, like -m")
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.add_argument("--full", action="store_true", help="whole arrays and texts, not their beginnings")
    parser.add_argument("--no-tensors", action="store_true", help="leave the list of tensors out")
    add_model_arguments(parser, engine=False)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from ..errors import ConfigError
    from ..model.embedded import embedded_model
    from ..model.gguf_file import open_gguf
    from .console import model_path, setup_logging

    setup_logging(args.verbose)
    if args.file and (args.model or args.hf_repo):
        raise ConfigError("the file is given more than once; use one of PATH, -m and -hf")
    args.model = args.model or args.file
    with open_gguf(model_path(args) or embedded_model()) as file:
        found = describe(file, full=args.full, tensors=not args.no_tensors)
    if args.json:
        print(json.dumps(found, ensure_ascii=not _writes(sys.stdout.encoding), indent=2))
    else:
        _print(found)
    return 0


def _writes(encoding: str | None) -> bool:
    """Whether an encoding has every character; JSON spells those that one lacks in its own way."""
    return (encoding or "").lower().replace("-", "") == "utf8"


def describe(file: GgufFile, full: bool = False, tensors: bool = True) -> dict[str, Any]:
    """The file as plain data; long arrays and texts are cut unless ``full``."""
    sizes: Counter[str] = Counter()
    for t in file.tensors.values():
        sizes[t.format.name] += t.nbytes
    found: dict[str, Any] = {
        "files": [str(p) for p in file.paths],
        "file_bytes": file.file_bytes,
        "parameters": sum(math.prod(t.shape) for t in file.tensors.values()),
        "tensor_bytes": dict(sizes.most_common()),
        "supported": _supported(file),
        "metadata": {key: _value(file, key, full) for key in file.metadata},
        "tensor_count": len(file.tensors),
    }
    if tensors:
        found["tensors"] = [
            {"name": t.name, "shape": list(t.shape), "type": t.format.name, "bytes": t.nbytes}
            for t in file.tensors.values()
        ]
    return found


def _supported(file: GgufFile) -> str:
    from ..errors import ModelFileError
    from ..model.hparams import read_hparams

    try:
        read_hparams(file)
    except ModelFileError as e:
        return f"no: {e}"
    return "yes"


def _value(file: GgufFile, key: str, full: bool) -> Any:
    length = file.metadata.array_length(key)
    if length is not None and length > _SHOWN and not full:
        return {"length": length, "first": _finite(file.metadata[key][:_SHOWN])}
    value = _finite(file.metadata[key])
    if isinstance(value, str) and len(value) > _TEXT and not full:
        return value[:_TEXT] + f"... ({len(value)} characters)"
    return value


def _finite(value: Any) -> Any:
    """A value, or a list, with words in place of numbers that JSON does not have."""
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _print(found: dict[str, Any]) -> None:
    from ..model.source import human

    for path in found["files"]:
        print(path)
    total = sum(found["tensor_bytes"].values())
    parts = ", ".join(f"{name} {n / max(total, 1):.0%}" for name, n in found["tensor_bytes"].items())
    print(f"size        {found['file_bytes'] / 2**20:.1f} MiB")
    print(f"parameters  {human(found['parameters'])}")
    print(f"formats     {parts}")
    print(f"supported   {found['supported']}")
    print("\nmetadata")
    for key, value in found["metadata"].items():
        if isinstance(value, dict):
            print(f"  {key} = {value['length']} entries: {value['first']!r} ...")
        else:
            print(f"  {key} = {value!r}")
    if "tensors" in found:
        print(f"\n{found['tensor_count']} tensors")
        for t in found["tensors"]:
            print(f"  {t['name']:<40} {t['type']:<8} {' x '.join(map(str, t['shape'])):<24} {t['bytes']} bytes")

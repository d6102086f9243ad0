"""Hugging Face checkpoint -> GGUF file: reads and checks everything first, then writes tensor by tensor."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFValueType, size_label

from ..errors import ConfigError, ModelFileError, UnsupportedModel
from ..formats import BY_NAME, Format
from .checkpoint import Checkpoint
from .hf_config import Settings, architecture, read_config, read_text_hparams, text_metadata, text_settings
from .recipe import Recipe, check, pieces
from .text_map import is_unused, text_prefix, text_recipes
from .vision_map import VISION_PREFIXES, vision_metadata, vision_prefix, vision_recipes, vision_settings
from .vocabulary import tokenizer_metadata
from .writer import GgufOutput, Typed, refuse_output

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
ProgressFn = Callable[[str, int, int], None]

# Name of an output type -> general.file_type, llama.cpp's numbers.
OUTTYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}
_NAMES_SHOWN = 8
# generation_config.json -> general.sampling.*
_SAMPLING = {
    "top_k": ("top_k", GGUFValueType.INT32),
    "top_p": ("top_p", GGUFValueType.FLOAT32),
    "min_p": ("min_p", GGUFValueType.FLOAT32),
    "temperature": ("temp", GGUFValueType.FLOAT32),
    "repetition_penalty": ("penalty_repeat", GGUFValueType.FLOAT32),
}


@dataclass(frozen=True, eq=False)
class _File:
    """A file that is about to be written."""

    path: Path
    metadata: Mapping[str, Any]
    recipes: Sequence[Recipe]
    form: Format
    split_max_bytes: int | None


def convert(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    outtype: str = "bf16",
    split_max_bytes: int | None = None,
    mmproj: str | os.PathLike[str] | None = None,
    mtp: bool = True,
    progress: ProgressFn | None = None,
) -> list[Path]:
    """Convert the checkpoint in ``folder``; -> the files written, those of the text model first.

    ``outtype``: the type of matrices, "f32", "f16", "bf16" or "q8_0"; norms and other small tensors are always F32, and
    rows that Q8_0's blocks do not divide are F16. ``split_max_bytes``: bytes of tensors in one file at most.
    ``mmproj``: where the vision tower goes, in F16, or F32 if that is ``outtype``; without it the tower is left out.
    ``mtp``: whether the MTP block is converted. ``progress``: called with a stage, bytes done and bytes in all.

    Files get their names when all is written; on any error nothing is left behind. Raises ModelFileError or
    UnsupportedModel for the checkpoint, ConfigError for arguments, Qwen35Error where writing fails.
    """
    if outtype not in OUTTYPES:
        raise ConfigError(f"the output type is '{outtype}'; one of {', '.join(OUTTYPES)} is needed")
    for path in (output, mmproj):
        if path is not None:
            refuse_output(Path(path))
    if mmproj is not None and Path(mmproj).resolve() == Path(output).resolve():
        raise ConfigError(f"{output}: the text model and the vision tower need two files")
    with Checkpoint(folder) as checkpoint:
        config = read_config(checkpoint)
        checkpoint.open_weights()
        files = [_text(checkpoint, config, Path(output), outtype, split_max_bytes, mtp)]
        tower = vision_prefix(checkpoint)
        if mmproj is not None:
            if tower is None:
                raise ConfigError(f"{checkpoint.folder}: the checkpoint has no vision tower; leave --mmproj out")
            files.append(_vision(checkpoint, config, Path(mmproj), tower, outtype, files[0]))
        elif tower is not None:
            log.warning("the vision tower is left out; --mmproj PATH writes it to a file of its own")
        return _write(checkpoint, files, progress)


def _text(
    checkpoint: Checkpoint, config: Settings, path: Path, outtype: str, split_max_bytes: int | None, mtp: bool
) -> _File:
    blocks = {m[1] for n in checkpoint.tensors if (m := re.match(r"mtp\.layers\.(\d+)\.", n))} if mtp else set()
    if len(blocks) > 1:
        raise UnsupportedModel(f"{checkpoint.folder}: {len(blocks)} MTP blocks; one is supported, or --no-mtp")
    hp = read_text_hparams(config, len(blocks))
    recipes = text_recipes(hp, text_prefix(checkpoint), checkpoint.tensors.keys())
    unknown = [
        n for n in _left_over(checkpoint, recipes) if not is_unused(n, hp, mtp) and not n.startswith(VISION_PREFIXES)
    ]
    _refuse(checkpoint, unknown)
    generation = checkpoint.json("generation_config.json") or {}
    meta: dict[str, Any] = {"general.architecture": architecture(config), "general.type": "model"}
    meta |= _sampling(checkpoint, generation)
    meta["general.name"] = model_name(checkpoint.folder)
    meta["general.size_label"] = _size_label(recipes)
    meta |= text_metadata(hp)
    meta["general.file_type"] = OUTTYPES[outtype]
    meta["general.quantization_version"] = 2
    meta |= tokenizer_metadata(checkpoint, hp.n_vocab, (generation, config.values, text_settings(config).values))
    return _File(path, meta, recipes, BY_NAME[outtype.upper()], split_max_bytes)


def _vision(checkpoint: Checkpoint, config: Settings, path: Path, prefix: str, outtype: str, text: _File) -> _File:
    vision = vision_settings(config)
    recipes = vision_recipes(vision, prefix)
    _refuse(checkpoint, [n for n in _left_over(checkpoint, recipes) if n.startswith(prefix)])
    outtype = "f32" if outtype == "f32" else "f16"
    n_embd = text.metadata[f"{architecture(config)}.embedding_length"]
    meta: dict[str, Any] = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "general.name": text.metadata["general.name"],
        "general.size_label": _size_label(recipes),
        "general.file_type": OUTTYPES[outtype],
    }
    meta |= vision_metadata(vision, n_embd, checkpoint.json("preprocessor_config.json") or {})
    meta["general.quantization_version"] = 2
    return _File(path, meta, recipes, BY_NAME[outtype.upper()], None)


def _left_over(checkpoint: Checkpoint, recipes: Sequence[Recipe]) -> list[str]:
    used = {name for recipe in recipes for name in recipe.sources}
    return [name for name in checkpoint.tensors if name not in used]


def _refuse(checkpoint: Checkpoint, unknown: Sequence[str]) -> None:
    """A tensor that nothing takes may change what the model computes."""
    if unknown:
        more = f" and {len(unknown) - _NAMES_SHOWN} more" if len(unknown) > _NAMES_SHOWN else ""
        raise UnsupportedModel(
            f"{checkpoint.folder}: tensors of no known use: {', '.join(unknown[:_NAMES_SHOWN])}{more}; "
            "the checkpoint is of another kind than its config.json says"
        )


def _write(checkpoint: Checkpoint, files: Sequence[_File], progress: ProgressFn | None) -> list[Path]:
    for file in files:
        for recipe in file.recipes:
            check(recipe, checkpoint)
    with ExitStack() as stack:  # names are given only after the last file is whole
        outputs = [
            stack.enter_context(
                GgufOutput(
                    f.path, f.metadata, [r.plan(f.form) for r in f.recipes], f.split_max_bytes, inputs=checkpoint.files
                )
            )
            for f in files
        ]
        done, total = 0, sum(o.nbytes for o in outputs)
        for file, output in zip(files, outputs, strict=True):
            for recipe in file.recipes:
                plan = recipe.plan(file.form)
                output.write(plan.name, _reported(pieces(recipe, checkpoint, plan.format), progress, done, total))
                done += plan.nbytes
    return [path for output in outputs for path in output.paths]


def _reported(found: Iterator[Array], progress: ProgressFn | None, done: int, total: int) -> Iterator[Array]:
    for piece in found:
        done += piece.nbytes
        if progress is not None:
            progress("converting", done, total)
        yield piece


def _size_label(recipes: Sequence[Recipe]) -> str:
    """Parameters as the gguf package writes them: ``27B``, or for experts ``256x0.1B``."""
    sizes = {r.name: math.prod(r.shape) for r in recipes}
    experts = {r.name: r.shape[0] for r in recipes if "_exps." in r.name}
    n_expert = sum(experts.values()) // len(experts) if experts else 0
    one = sum(sizes[name] // n for name, n in experts.items())
    label: str = size_label(
        sum(sizes.values()), sum(n for name, n in sizes.items() if name not in experts), one, n_expert
    )
    return label


def _sampling(checkpoint: Checkpoint, generation: Mapping[str, Any]) -> dict[str, Any]:
    keys = {}
    for name, (key, kind) in _SAMPLING.items():
        value = generation.get(name)
        if value is None:
            continue
        whole = kind == GGUFValueType.INT32
        if type(value) not in ((int,) if whole else (int, float)) or not math.isfinite(value) or abs(value) >= 2**31:
            path = checkpoint.folder / "generation_config.json"
            raise ModelFileError(f"{path}: '{name}' is {value!r:.60}; a {'whole ' if whole else ''}number is needed")
        keys[f"general.sampling.{key}"] = Typed(value if whole else float(np.float32(value)), kind)
    return keys


def model_name(folder: Path) -> str:
    """A model's name: that of its folder, or in a hub's cache that of the repository."""
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return folder.name or "model"

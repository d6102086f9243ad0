"""Which format each tensor of a model gets: the named mixes of llama.cpp's quantiser, and what a user sets by hand.

Pure functions of names, shapes and the numbers of a model. Knows nothing of files and weights.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from ..formats import BY_NAME, FILE_TYPES, Format
from ..model.hparams import HParams

__all__ = ["ALIASES", "MIXES", "Choice", "Mix", "MixOptions", "choose", "find_format", "find_mix", "parse_tensor_type"]

Shape = tuple[int, ...]  # in ggml's order, the contiguous dimension first


@dataclass(frozen=True)
class Mix:
    """A named mix. ``base`` is the format of most matrices; ``bits`` are those per weight of a whole model of the
    family's usual sizes (the 9B, for MXFP4_MOE the 35B-A3B), for people to choose by."""

    name: str
    base: str
    bits: float

    @property
    def file_type(self) -> int:
        """The number that ``general.file_type`` gets."""
        return next(number for number, name in FILE_TYPES.items() if name == self.name)


MIXES: dict[str, Mix] = {
    mix.name: mix
    for mix in (
        Mix("F32", "F32", 32.0),
        Mix("BF16", "BF16", 16.0),
        Mix("F16", "F16", 16.0),
        Mix("Q8_0", "Q8_0", 8.5),
        Mix("Q6_K", "Q6_K", 6.57),
        Mix("Q5_K_M", "Q5_K", 5.77),
        Mix("Q5_K_S", "Q5_K", 5.62),
        Mix("Q5_1", "Q5_1", 6.06),
        Mix("Q5_0", "Q5_0", 5.62),
        Mix("Q4_K_M", "Q4_K", 5.02),
        Mix("Q4_K_S", "Q4_K", 4.76),
        Mix("Q4_1", "Q4_1", 5.18),
        Mix("Q4_0", "Q4_0", 4.73),
        Mix("IQ4_NL", "IQ4_NL", 4.84),
        Mix("IQ4_XS", "IQ4_XS", 4.65),
        Mix("Q3_K_L", "Q3_K", 4.38),
        Mix("Q3_K_M", "Q3_K", 4.11),
        Mix("Q3_K_S", "Q3_K", 3.79),
        Mix("Q2_K", "Q2_K", 3.4),
        Mix("MXFP4_MOE", "MXFP4", 4.57),
    )
}
ALIASES: dict[str, str] = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

_FALLBACKS = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    **{name: "IQ4_NL" for name in BY_NAME if name.startswith("IQ") and name != "IQ4_NL"},
}
_KEPT = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d.weight")  # small, and sensitive
_LAYER = re.compile(r"blk\.(\d+)\.")
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_VALUES, _DOWN, _ATTENTION_OUTPUT = "values", "down", "attention output"


@dataclass(frozen=True)
class _Place:
    """A matrix among those of its kind: number ``index`` of ``count`` from the first layer on, in a model with
    ``group`` query heads to a key head."""

    index: int
    count: int
    group: int
    imatrix: bool

    @property
    def early(self) -> bool:
        """In the first eighth."""
        return self.index < self.count // 8

    @property
    def favoured(self) -> bool:
        """In the first or last eighth, or each third one between."""
        return self.early or self.index >= 7 * self.count // 8 or (self.index - self.count // 8) % 3 == 2


_Rule = Callable[[_Place], str | None]  # -> a format, None: the base


def _always(name: str) -> _Rule:
    return lambda place: name


def _favoured(name: str) -> _Rule:
    return lambda place: name if place.favoured else None


def _early(name: str, otherwise: str | None = None) -> _Rule:
    return lambda place: name if place.early else otherwise


def _if_grouped(name: str, otherwise: str | None = None) -> _Rule:
    # Few key heads make these matrices small: more bits cost little.
    return lambda place: name if place.group >= 4 else otherwise


_SIX_BITS: dict[str, _Rule] = {_VALUES: _favoured("Q6_K"), _DOWN: _favoured("Q6_K")}
_FOUR_BITS: dict[str, _Rule] = {
    _VALUES: _if_grouped("Q5_K"),
    _DOWN: lambda place: "Q5_K" if place.early and not place.imatrix else None,
}
# Where a mix leaves its base, by the kind of matrix.
_RULES: dict[str, dict[str, _Rule]] = {
    "Q5_K_M": _SIX_BITS,
    "Q4_K_M": _SIX_BITS,
    "Q4_K_S": {_VALUES: lambda place: "Q5_K" if place.index < 4 else None, _DOWN: _early("Q5_K")},
    "Q3_K_L": {kind: _always("Q5_K") for kind in (_VALUES, _DOWN, _ATTENTION_OUTPUT)},
    "Q3_K_M": {
        _VALUES: lambda place: "Q5_K" if place.index < 2 else "Q4_K",
        _DOWN: lambda place: "Q5_K" if place.index < place.count // 16 else "Q4_K",
        _ATTENTION_OUTPUT: _always("Q4_K"),
    },
    "Q2_K": {
        _VALUES: _if_grouped("Q4_K", "Q3_K"),
        _DOWN: _always("Q3_K"),
        _ATTENTION_OUTPUT: _always("Q3_K"),
    },
    "IQ4_NL": _FOUR_BITS,
    "IQ4_XS": _FOUR_BITS,
    # With importance weights the first of these can go astray without an offset of their own.
    "Q4_0": {_DOWN: lambda place: "Q4_1" if place.early and place.imatrix else None},
    "Q5_0": {_DOWN: lambda place: "Q5_1" if place.early and place.imatrix else None},
}


@dataclass(frozen=True)
class MixOptions:
    """What a user sets beside the mix: ``tensor_types`` (pattern, format), the first that is found in a name counts;
    formats of the output and the embedding, which win over patterns; ``pure``: the base everywhere else."""

    tensor_types: Sequence[tuple[re.Pattern[str], Format]] = ()
    output: Format | None = None
    token_embedding: Format | None = None
    pure: bool = False
    imatrix: bool = False


@dataclass(frozen=True)
class Choice:
    """The format of a tensor, None: it stays as it is. ``note`` says why it is not the one that was asked for."""

    format: Format | None
    note: str | None = None


def find_mix(text: str) -> Mix:
    """A mix by its name or alias, in any case. Raises ConfigError with the nearest name and the list."""
    name = ALIASES.get(text.upper(), text.upper())
    if name not in MIXES:
        raise ConfigError(_unknown(text, [*MIXES, *ALIASES]))
    return MIXES[name]


def find_format(text: str, known: Iterable[str]) -> Format:
    """One of the ``known`` formats by its name, in any case. Raises ConfigError with the nearest name and the list."""
    names = list(known)
    if text.upper() not in names:
        raise ConfigError(_unknown(text, names))
    return BY_NAME[text.upper()]


def parse_tensor_type(text: str, known: Iterable[str]) -> tuple[re.Pattern[str], Format]:
    """PATTERN=TYPE. Raises ConfigError that names what is wrong with it."""
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern or not name:
        raise ConfigError(f"--tensor-type {text}: PATTERN=TYPE is needed, such as attn_v=Q6_K")
    try:
        return re.compile(pattern), find_format(name, known)
    except re.error as e:
        raise ConfigError(f"--tensor-type {text}: '{pattern}' is not a regular expression: {e}") from e
    except ConfigError as e:
        raise ConfigError(f"--tensor-type {text}: {e}") from e


def choose(mix: Mix, shapes: Mapping[str, Shape], hp: HParams, options: MixOptions) -> dict[str, Choice]:
    """The format of every tensor, in the order of ``shapes``.

    Raises ConfigError naming a pattern or a flag of ``options`` that decides no tensor.
    """
    if hp.tied and options.output and options.token_embedding:
        raise ConfigError("--output-tensor-type: the output is the token embedding here, whose own flag is given too")
    values = sorted((n for n in shapes if _kind(n) == _VALUES), key=lambda n: (_layer(n), n))
    rank = {name: i for i, name in enumerate(values)}
    group = hp.n_head // hp.n_head_kv
    used: set[int] = set()

    def place(name: str, kind: str) -> _Place:
        if kind == _VALUES:
            return _Place(rank[name], len(rank), group, options.imatrix)
        return _Place(_layer(name), hp.n_layer + hp.n_mtp, group, options.imatrix)

    def wanted(name: str, shape: Shape) -> Format:
        is_output = name == (_EMBEDDING if hp.tied else _OUTPUT)
        by_hand = options.token_embedding if name == _EMBEDDING else None
        if by_hand is None and is_output:
            by_hand = options.output
        if by_hand is not None:
            return by_hand
        for i, (pattern, form) in enumerate(options.tensor_types):
            if pattern.search(name):
                used.add(i)
                return form
        base = BY_NAME[mix.base]
        if options.pure or not base.quantized:
            return base
        if mix.name == "MXFP4_MOE":
            return base if len(shape) > 2 and shape[2] > 1 else BY_NAME["Q8_0"]
        if is_output:
            return BY_NAME["Q8_0" if mix.base == "Q8_0" else "Q6_K"]
        kind = _kind(name)
        rule = _RULES.get(mix.name, {}).get(kind) if kind else None
        special = rule(place(name, kind)) if rule and kind else None
        return base if special is None else BY_NAME[special]

    chosen = {
        name: fitting(wanted(name, shape), shape[0]) if _quantizable(name, shape) else Choice(None)
        for name, shape in shapes.items()
    }
    for i, (pattern, _) in enumerate(options.tensor_types):
        if i not in used:
            raise ConfigError(_unused(pattern, [n for n, s in shapes.items() if _quantizable(n, s)]))
    return chosen


def fitting(form: Format, columns: int) -> Choice:
    """``form``, or what takes its place where its blocks do not divide rows of ``columns`` elements."""
    if columns % form.block == 0:
        return Choice(form)
    other = BY_NAME.get(_FALLBACKS.get(form.name, ""))
    if other is None or columns % other.block:
        other = BY_NAME["F16"]
    return Choice(other, f"rows of {columns} are no multiple of {form.block}: {other.name} in place of {form.name}")


def _kind(name: str) -> str | None:
    """The kind of matrix that rules speak of."""
    if not _LAYER.match(name):
        return None
    if name.endswith((".attn_v.weight", ".attn_qkv.weight")):
        return _VALUES
    if ".ffn_down" in name:
        return _DOWN
    return _ATTENTION_OUTPUT if name.endswith(".attn_output.weight") else None


def _layer(name: str) -> int:
    found = _LAYER.match(name)
    return int(found[1]) if found else 0


def _quantizable(name: str, shape: Shape) -> bool:
    """Whether it is a matrix of weights, and none of the few that stay as they are."""
    rows = any(n > 1 for n in shape[1:])
    return rows and name.endswith("weight") and not name.endswith(_KEPT)


def _unused(pattern: re.Pattern[str], names: Sequence[str]) -> str:
    text = f"--tensor-type: the pattern '{pattern.pattern}' decides no tensor: "
    if any(pattern.search(n) for n in names):
        return text + "all that it fits are decided by an earlier pattern or by a flag of their own; put it first"
    return text + "it is in the name of none that can be quantised (qwen35rt info lists names)"


def _unknown(text: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(text.upper(), names, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"unknown type '{text}'{hint}; there are {', '.join(names)}"

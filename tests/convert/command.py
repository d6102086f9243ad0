"""The quantize command as tests call it, and sizes of models that it can make of every format."""

from __future__ import annotations

from typing import Any

from qwen35rt.cli import main

# All rows are multiples of 256, so that every format fits.
WIDE: dict[str, Any] = {"n_embd": 256, "n_ff": 256, "n_head": 4, "head_dim": 64, "ssm_state": 64}
EXPERTS: dict[str, Any] = WIDE | {"n_expert": 5, "n_ff_expert": 256, "n_ff_shared": 256}


def run(*args: object) -> int:
    """The command with these arguments."""
    return main(["quantize", *map(str, args)])

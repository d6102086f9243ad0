"""How many rows of the next step each sequence gets. Decisions only: pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence


def share_rows(wanted: Sequence[int], budget: int, beside_decode: int) -> list[int]:
    """Rows for each sequence, in order of arrival. ``wanted``: 1 for one that decodes, its open prompt rows otherwise.

    Those that decode always get their row, so the budget must hold one row for each sequence. Prompts share the rest,
    the oldest first; beside others that decode they get ``beside_decode`` rows together at most, so that a long prompt
    does not make the others wait long for their next token.
    """
    decoding = sum(n == 1 for n in wanted)
    left = budget - decoding
    if decoding:
        left = min(left, beside_decode)
    shares = []
    for n in wanted:
        rows = 1 if n == 1 else min(n, left)
        left -= rows if n != 1 else 0
        shares.append(rows)
    return shares

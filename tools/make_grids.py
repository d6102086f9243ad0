"""Writes the lookup grids of the IQ1, IQ2 and IQ3 formats to standard output.

The values are constants of the file format; they come from the gguf package. Run: python tools/make_grids.py >
csrc/unpack/grids.h, and with --cuda > cuda/grids.cuh, where a module gets only the grid of its format.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
from gguf import quants

HEADER = """\
// Lookup grids of IQ1, IQ2 and IQ3, written by tools/make_grids.py: a row of values to a word, the
// lowest byte first. Rows of IQ1 hold 8 times the value (-8, 0 or 8).
#ifndef QRT_GRIDS_H
#define QRT_GRIDS_H
#include <stdint.h>
// clang-format off
"""
FOOTER = """\
// clang-format on
#endif
"""
CUDA_HEADER = HEADER.replace("GRIDS_H", "GRIDS_CUH").replace("#include <stdint.h>\n", "")
CUDA_USERS = {  # formats of a grid
    "iq1_grid": ("IQ1_S", "IQ1_M"),
    "iq2_xxs_grid": ("IQ2_XXS",),
    "iq2_xs_grid": ("IQ2_XS",),
    "iq2_s_grid": ("IQ2_S",),
    "iq3_xxs_grid": ("IQ3_XXS",),
    "iq3_s_grid": ("IQ3_S",),
}
GRIDS = (
    ("IQ1_S", "iq1_grid", 8, 8),  # IQ1_M uses the same one
    ("IQ2_XXS", "iq2_xxs_grid", 8, 1),
    ("IQ2_XS", "iq2_xs_grid", 8, 1),
    ("IQ2_S", "iq2_s_grid", 8, 1),
    ("IQ3_XXS", "iq3_xxs_grid", 4, 1),
    ("IQ3_S", "iq3_s_grid", 4, 1),
)


def table(name: str, c_name: str, width: int, factor: int) -> Iterator[str]:
    """Lines of one C table; ``width`` values of a row become one word of as many bytes."""
    source = getattr(quants, name)
    source.init_grid()
    rows = (source.grid.reshape(-1, width) * factor).astype(np.int8).view(f"<u{width}").ravel()
    yield f"static const uint{8 * width}_t {c_name}[{len(rows)}] = {{"
    per_line = 64 // width
    for i in range(0, len(rows), per_line):
        yield "    " + ", ".join(f"0x{row:0{2 * width}x}" for row in rows[i : i + per_line]) + ","
    yield "};"


def text() -> str:
    """The whole header file."""
    lines = [line for grid in GRIDS for line in table(*grid)]
    return HEADER + "\n".join(lines) + "\n" + FOOTER


def cuda_text() -> str:
    """The same for device code."""
    lines = []
    for grid in GRIDS:
        lines.append("#if " + " || ".join(f"defined(QRT_{name})" for name in CUDA_USERS[grid[1]]))
        for line in table(*grid):
            lines.append(line.replace("static const uint64_t", "__device__ const u64"))
            lines[-1] = lines[-1].replace("static const uint32_t", "__device__ const u32")
        lines.append("#endif")
    return CUDA_HEADER + "\n".join(lines) + "\n" + FOOTER


if __name__ == "__main__":
    sys.stdout.write(cuda_text() if "--cuda" in sys.argv else text())

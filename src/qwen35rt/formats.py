"""One row per weight format of a GGUF file. Knows nothing of files, kernels or devices.

The table must equal ``QRT_FORMATS`` in csrc/blocks.h and the gguf package's own; a test compares the three.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A storage format: ``block`` elements of a row take ``nbytes`` bytes; ``id`` is its number in a GGUF file."""

    name: str
    id: int
    block: int
    nbytes: int

    @property
    def quantized(self) -> bool:
        """True for block formats (they meet int8 activations), False for F32, F16 and BF16."""
        return self.block > 1

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of ``columns`` elements; ``columns`` must be a multiple of ``block``."""
        return columns // self.block * self.nbytes


FORMATS: tuple[Format, ...] = (
    Format("F32", 0, 1, 4),
    Format("F16", 1, 1, 2),
    Format("Q4_0", 2, 32, 18),
    Format("Q4_1", 3, 32, 20),
    Format("Q5_0", 6, 32, 22),
    Format("Q5_1", 7, 32, 24),
    Format("Q8_0", 8, 32, 34),
    Format("Q2_K", 10, 256, 84),
    Format("Q3_K", 11, 256, 110),
    Format("Q4_K", 12, 256, 144),
    Format("Q5_K", 13, 256, 176),
    Format("Q6_K", 14, 256, 210),
    Format("IQ2_XXS", 16, 256, 66),
    Format("IQ2_XS", 17, 256, 74),
    Format("IQ3_XXS", 18, 256, 98),
    Format("IQ1_S", 19, 256, 50),
    Format("IQ4_NL", 20, 32, 18),
    Format("IQ3_S", 21, 256, 110),
    Format("IQ2_S", 22, 256, 82),
    Format("IQ4_XS", 23, 256, 136),
    Format("IQ1_M", 29, 256, 56),
    Format("BF16", 30, 1, 2),
    Format("TQ1_0", 34, 256, 54),
    Format("TQ2_0", 35, 256, 66),
    Format("MXFP4", 39, 32, 17),
    Format("NVFP4", 40, 64, 36),
)

BY_ID: dict[int, Format] = {f.id: f for f in FORMATS}
BY_NAME: dict[str, Format] = {f.name: f for f in FORMATS}

# general.file_type -> name; the numbers are llama.cpp's.
FILE_TYPES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
    39: "NVFP4",
}

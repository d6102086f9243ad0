"""The mean of checkpoints of one model, which is better than each of them where they are ends of one training.

    python -m tools.embedded_model.mean FOLDER CHECKPOINT=WEIGHT CHECKPOINT=WEIGHT ...

Weights are shares of one. Everything but the tensors is that of the last checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

TENSORS = "model.safetensors"
BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def mean(parts: list[tuple[Path, float]]) -> dict[str, npt.NDArray[np.float32]]:
    """Tensors by name, float32, summed in float64. Raises ValueError where names, shapes or shares do not fit."""
    if abs(sum(share for _, share in parts) - 1) > 1e-6:
        raise ValueError("the weights are no shares of one")
    sums: dict[str, npt.NDArray[np.float64]] = {}
    for folder, share in parts:
        tensors = load_file(folder / TENSORS)
        shapes = {name: t.shape for name, t in tensors.items()}
        if sums and shapes != {name: t.shape for name, t in sums.items()}:
            raise ValueError(f"{folder}: not the tensors of {parts[0][0]}")
        for name, t in tensors.items():
            sums[name] = sums.get(name, 0.0) + share * t.astype(np.float64)
    return {name: t.astype(np.float32) for name, t in sums.items()}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the mean is written")
    parser.add_argument("checkpoint", nargs="+", metavar="CHECKPOINT=WEIGHT")
    args = parser.parse_args()
    parts = []
    for text in args.checkpoint:
        name, _, share = text.rpartition("=")
        parts.append((Path(name), float(share)))
    args.folder.mkdir(parents=True, exist_ok=True)
    save_file(mean(parts), args.folder / TENSORS, metadata={"format": "pt"})
    for name in BESIDE:
        shutil.copy(parts[-1][0] / name, args.folder / name)


if __name__ == "__main__":
    main()

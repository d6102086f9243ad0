"""The mean of checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tools.embedded_model.mean import TENSORS, mean


def _checkpoint(folder: Path, **tensors: list[float]) -> Path:
    folder.mkdir()
    save_file({name: np.array(t, np.float32) for name, t in tensors.items()}, folder / TENSORS)
    return folder


def test_each_checkpoint_has_its_share(tmp_path: Path) -> None:
    first, second = _checkpoint(tmp_path / "a", x=[1, 2], y=[8]), _checkpoint(tmp_path / "b", x=[3, 6], y=[4])
    got = mean([(first, 0.25), (second, 0.75)])
    assert {name: t.tolist() for name, t in got.items()} == {"x": [2.5, 5.0], "y": [5.0]}
    assert all(t.dtype == np.float32 for t in got.values())


def test_other_tensors_and_other_sums_are_refused(tmp_path: Path) -> None:
    first, second = _checkpoint(tmp_path / "a", x=[1, 2]), _checkpoint(tmp_path / "b", x=[3])
    with pytest.raises(ValueError, match="not the tensors of"):
        mean([(first, 0.5), (second, 0.5)])
    with pytest.raises(ValueError, match="no shares of one"):
        mean([(first, 0.5), (first, 0.6)])

"""Whole models against the oracle's logits, traces and states, for every backend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen35rt.backends.base import Backend, Batch, Executable, Limits
from qwen35rt.backends.reference import ReferenceBackend
from qwen35rt.model.gguf_file import GgufFile
from qwen35rt.model.graph import build_program
from qwen35rt.model.hparams import read_hparams
from qwen35rt.model.program import Program
from qwen35rt.model.weights import load_weights

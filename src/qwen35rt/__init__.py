"""Run Qwen3.5-family GGUF models on CPU and NVIDIA GPUs."""

from __future__ import annotations

__version__ = "0.1.0"

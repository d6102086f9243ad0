"""The vision tower of a checkpoint: its numbers, keys and tensors in the form of an mmproj file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..errors import ModelFileError
from .checkpoint import Checkpoint
from .hf_config import Settings
from .recipe import Recipe

VISION_PREFIXES = ("model.visual.", "visual.")


def vision_prefix(checkpoint: Checkpoint) -> str | None:
    """What stands before the tower's names, None if the checkpoint has no tower."""
    return next((p for p in VISION_PREFIXES if any(n.startswith(p) for n in checkpoint.tensors)), None)


def vision_settings(config: Settings) -> Settings:
    """config.json's part about the tower. Raises UnsupportedModel for a tower of another form."""
    vision = config.inner("vision_config")
    if vision is None:
        raise ModelFileError(f"{config.path}: 'vision_config' is missing and the checkpoint has a vision tower")
    vision.only("hidden_act", "gelu_pytorch_tanh")
    vision.only("deepstack_visual_indexes", [])
    vision.only("in_channels", 3)
    vision.only("temporal_patch_size", 2, [2])
    return vision


def vision_metadata(vision: Settings, n_embd: int, processor: Mapping[str, Any]) -> dict[str, Any]:
    """The clip.* keys; ``n_embd``: the text model's width, ``processor``: preprocessor_config.json."""
    side = math.isqrt(positions := vision.count("num_position_embeddings"))
    if side * side != positions:
        vision.refuse("num_position_embeddings", "a square number is needed")
    if vision.count("out_hidden_size") != n_embd:
        vision.refuse("out_hidden_size", f"the text model's hidden_size is {n_embd}")
    depth = vision.count("depth")
    means = {name: processor.get(f"image_{name}") or [0.5] * 3 for name in ("mean", "std")}
    for name, value in means.items():
        if not isinstance(value, list) or len(value) != 3 or any(type(x) not in (int, float) for x in value):
            raise ModelFileError(f"preprocessor_config.json: 'image_{name}' is {value!r:.60}; three numbers are needed")
    keys: dict[str, Any] = {
        "image_size": side * vision.count("patch_size"),
        "patch_size": vision.count("patch_size"),
        "embedding_length": vision.count("hidden_size"),
        "feed_forward_length": vision.count("intermediate_size"),
        "block_count": depth,
        "attention.head_count": vision.count("num_heads"),
        "attention.layer_norm_epsilon": 1e-6,
        "projection_dim": n_embd,
        "spatial_merge_size": vision.count("spatial_merge_size"),
        "image_mean": [float(x) for x in means["mean"]],
        "image_std": [float(x) for x in means["std"]],
        "is_deepstack_layers": [False] * depth,
    }
    return {
        "clip.has_vision_encoder": True,
        "clip.projector_type": "qwen3vl_merger",
        "clip.use_gelu": True,
    } | {f"clip.vision.{key}": value for key, value in keys.items()}


def vision_recipes(vision: Settings, prefix: str) -> list[Recipe]:
    """The recipes of all tensors of the tower."""
    return list(_recipes(vision, prefix))


def _recipes(vision: Settings, p: str) -> Iterator[Recipe]:
    d, ff, patch = (vision.count(n) for n in ("hidden_size", "intermediate_size", "patch_size"))
    merged = d * vision.count("spatial_merge_size") ** 2
    n_embd, n_pos = vision.count("out_hidden_size"), vision.count("num_position_embeddings")

    def linear(name: str, source: str, rows: int, cols: int) -> Iterator[Recipe]:
        yield Recipe(name + ".weight", (rows, cols), (source + ".weight",), (rows, cols))
        yield Recipe(name + ".bias", (rows,), (source + ".bias",), (rows,), matrix=False)

    def norm(name: str, source: str) -> Iterator[Recipe]:
        for part in ("weight", "bias"):
            yield Recipe(f"{name}.{part}", (d,), (f"{source}.{part}",), (d,), matrix=False)

    conv = p + "patch_embed.proj"
    # [D, 3, 2, patch, patch]: the third axis is the frame, which the file keeps apart.
    rows = np.arange(d * 3 * 2 * patch, dtype=np.int64).reshape(d, 3, 2, patch)
    for frame, name in enumerate(("v.patch_embd.weight", "v.patch_embd.weight.1")):
        source = (d, 3, 2, patch, patch)
        yield Recipe(name, (d, 3, patch, patch), (conv + ".weight",), source, rows=rows[:, :, frame].reshape(-1))
    yield Recipe("v.patch_embd.bias", (d,), (conv + ".bias",), (d,), matrix=False)
    yield Recipe("v.position_embd.weight", (n_pos, d), (p + "pos_embed.weight",), (n_pos, d), matrix=False)
    for i in range(vision.count("depth")):
        b, q = f"v.blk.{i}.", f"{p}blocks.{i}."
        yield from norm(b + "ln1", q + "norm1")
        yield from linear(b + "attn_qkv", q + "attn.qkv", 3 * d, d)
        yield from linear(b + "attn_out", q + "attn.proj", d, d)
        yield from norm(b + "ln2", q + "norm2")
        yield from linear(b + "ffn_up", q + "mlp.linear_fc1", ff, d)
        yield from linear(b + "ffn_down", q + "mlp.linear_fc2", d, ff)
    yield from norm("v.post_ln", p + "merger.norm")
    yield from linear("mm.0", p + "merger.linear_fc1", merged, merged)
    yield from linear("mm.2", p + "merger.linear_fc2", n_embd, merged)

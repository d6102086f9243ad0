"""The numbers of a checkpoint's config.json, as HParams, and the keys that state them in a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..config import FILE_LIMITS
from ..errors import ModelFileError, UnsupportedModel
from ..model.hparams import HParams
from .checkpoint import Checkpoint

CLASSES = {
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5ForConditionalGeneration": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
}
_WIDEST = FILE_LIMITS.max_width


class Settings:
    """An object of a JSON file with typed getters; their errors name the file and the field."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def refuse(self, name: str, need: str, kind: type[ModelFileError] = ModelFileError) -> NoReturn:
        found = "is missing" if self.values.get(name) is None else f"is {_short(self.values[name])}"
        raise kind(f"{self.path}: '{self.prefix}{name}' {found}; {need}")

    def count(self, name: str, default: int | None = None, low: int = 1, high: int = _WIDEST) -> int:
        """A whole number from ``low`` to ``high``."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or not low <= value <= high:
            self.refuse(name, f"a whole number from {low} to {high} is needed")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 < value < 1e30:
            self.refuse(name, "a positive number is needed")
        return float(value)

    def inner(self, name: str) -> Settings | None:
        """The object below a name, None if there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, "an object is needed")
        return Settings(self.path, value, f"{self.prefix}{name}.")

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse a field with another value than these; it may be absent."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            self.refuse(name, f"only {' or '.join(map(_short, allowed))} is supported", UnsupportedModel)


def read_config(checkpoint: Checkpoint) -> Settings:
    """config.json of a checkpoint that can be converted, by its architecture and its weights' form."""
    values = checkpoint.json("config.json")
    if values is None:
        raise ModelFileError(f"{checkpoint.folder}: no config.json; name the folder of a whole checkpoint")
    config = Settings(checkpoint.folder / "config.json", values)
    architecture(config)
    for place in (config, config.inner("text_config")):
        quantized = place.inner("quantization_config") if place else None
        if quantized is not None:
            method = quantized.values.get("quant_method", "unknown")
            raise UnsupportedModel(
                f"{config.path}: the checkpoint is quantised ({_short(method)}); take the one that is not"
            )
    return config


def architecture(config: Settings) -> str:
    """The GGUF architecture of a checkpoint."""
    names = config.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in CLASSES:
        config.refuse("architectures", f"known: {', '.join(CLASSES)}", UnsupportedModel)
    return CLASSES[names[0]]


def text_settings(config: Settings) -> Settings:
    """The part of config.json that describes the text model: text_config, or all of a flat file."""
    return config.inner("text_config") or config


def read_text_hparams(config: Settings, n_mtp: int) -> HParams:
    """The text model's numbers; ``n_mtp``: MTP blocks that are to be converted.

    Raises ModelFileError for missing or impossible ones, UnsupportedModel for variants that have no GGUF form.
    """
    arch, text = architecture(config), text_settings(config)
    moe = arch == "qwen35moe"
    text.only("hidden_act", "silu")
    text.only("attention_bias", False)
    text.only("attn_output_gate", True)
    text.only("mlp_only_layers", [])
    text.only("decoder_sparse_step", 1)
    n_layer = text.count("num_hidden_layers", high=FILE_LIMITS.max_blocks)
    n_embd, n_head = text.count("hidden_size"), text.count("num_attention_heads")
    n_head_kv = text.count("num_key_value_heads", n_head)
    head_dim = text.count("head_dim", 256)
    d, nk, nv = (text.count(f"linear_{n}") for n in ("key_head_dim", "num_key_heads", "num_value_heads"))
    if text.count("linear_value_head_dim") != d:
        text.refuse("linear_value_head_dim", f"the keys have {d}", UnsupportedModel)
    if nv % nk:
        text.refuse("linear_num_value_heads", f"a multiple of the {nk} key heads is needed")
    if n_head % n_head_kv:
        text.refuse("num_attention_heads", f"a multiple of the {n_head_kv} key/value heads is needed")
    theta, rope_dim, sections = _rope(text, head_dim)
    n_expert = text.count("num_experts", high=65_535) if moe else 0
    return HParams(
        arch=arch,
        n_layer=n_layer,
        n_mtp=n_mtp,
        n_ctx_train=text.count("max_position_embeddings", high=2**31 - 1),
        n_embd=n_embd,
        n_ff=0 if moe else text.count("intermediate_size"),
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        rms_eps=text.number("rms_norm_eps"),
        rope_theta=theta,
        rope_dim=rope_dim,
        rope_sections=sections,
        full_attention=_full_attention(text, n_layer),
        conv_kernel=text.count("linear_conv_kernel_dim", low=2, high=64),
        ssm_state=d,
        ssm_k_heads=nk,
        ssm_v_heads=nv,
        n_expert=n_expert,
        n_expert_used=text.count("num_experts_per_tok", high=n_expert) if moe else 0,
        n_ff_expert=text.count("moe_intermediate_size") if moe else 0,
        n_ff_shared=text.count("shared_expert_intermediate_size") if moe else 0,
        n_vocab=text.count("vocab_size"),
        tied=_tied(config, text),
    )


def _tied(config: Settings, text: Settings) -> bool:
    for place in (config, text):  # a checkpoint with vision decides above the text part
        value = place.values.get("tie_word_embeddings")
        if value is not None:
            if not isinstance(value, bool):
                place.refuse("tie_word_embeddings", "true or false is needed")
            return value
    return False


def _rope(text: Settings, head_dim: int) -> tuple[float, int, tuple[int, ...]]:
    """-> base, rotated columns of a head, pairs that each axis turns (4 numbers)."""
    # Older files keep the fields beside the others, and the scaling under its own name.
    rope = text.inner("rope_parameters") or text.inner("rope_scaling") or text
    for name in ("rope_type", "type"):
        if rope is not text:
            rope.only(name, "default")
    rope_theta = rope if rope.values.get("rope_theta") is not None else text
    factor_at = rope if rope.values.get("partial_rotary_factor") is not None else text
    factor = factor_at.number("partial_rotary_factor", 0.25)
    dim = int(head_dim * factor)
    if factor > 1 or dim < 2 or dim % 2:
        factor_at.refuse("partial_rotary_factor", f"it must leave an even number of the {head_dim} columns of a head")
    half = dim // 2
    # Without sections the axes take turns to the end: t, h, w, t, h, w ...
    sections = rope.values.get("mrope_section") or [(half + 2) // 3, (half + 1) // 3, half // 3]
    if not isinstance(sections, list) or len(sections) != 3 or any(type(n) is not int or n < 0 for n in sections):
        rope.refuse("mrope_section", "three whole numbers are needed")
    if sum(sections) != half:
        rope.refuse("mrope_section", f"their sum must be {half}, half of the rotated columns")
    rope.only("mrope_interleaved", True)
    return rope_theta.number("rope_theta"), dim, (*sections, 0)


def _full_attention(text: Settings, n_layer: int) -> tuple[bool, ...]:
    kinds = text.values.get("layer_types")
    if kinds is None:
        interval = text.count("full_attention_interval", 4)
        return tuple((i + 1) % interval == 0 for i in range(n_layer))
    known = ("linear_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != n_layer or any(k not in known for k in kinds):
        text.refuse("layer_types", f"{n_layer} entries '{known[0]}' or '{known[1]}' are needed")
    return tuple(k == "full_attention" for k in kinds)


def text_metadata(hp: HParams) -> dict[str, Any]:
    """The architecture's keys, typed as GgufOutput takes them: ints u32, floats f32, the sections an i32 list."""
    a = hp.arch
    meta: dict[str, Any] = {
        "block_count": hp.n_layer + hp.n_mtp,
        "context_length": hp.n_ctx_train,
        "embedding_length": hp.n_embd,
    }
    if hp.moe:
        meta |= {
            "expert_count": hp.n_expert,
            "expert_used_count": hp.n_expert_used,
            "expert_feed_forward_length": hp.n_ff_expert,
            "expert_shared_feed_forward_length": hp.n_ff_shared,
        }
    else:
        meta["feed_forward_length"] = hp.n_ff
    meta |= {
        "attention.head_count": hp.n_head,
        "attention.head_count_kv": hp.n_head_kv,
        "attention.key_length": hp.head_dim,
        "attention.value_length": hp.head_dim,
        "attention.layer_norm_rms_epsilon": hp.rms_eps,
        "attention.recurrent_layers": [not full for full in hp.full_attention] + [False] * hp.n_mtp,
        "rope.freq_base": hp.rope_theta,
        "rope.dimension_sections": list(hp.rope_sections),
        "rope.dimension_count": hp.rope_dim,
        "ssm.conv_kernel": hp.conv_kernel,
        "ssm.state_size": hp.ssm_state,
        "ssm.group_count": hp.ssm_k_heads,
        "ssm.time_step_rank": hp.ssm_v_heads,
        "ssm.inner_size": hp.ssm_v_heads * hp.ssm_state,
        "full_attention_interval": interval(hp.full_attention),
    }
    if hp.n_mtp:
        meta["nextn_predict_layers"] = hp.n_mtp
    return {f"{a}.{key}": value for key, value in meta.items()}


def interval(full: tuple[bool, ...]) -> int:
    """The interval of a regular pattern of layers; 4 for an irregular one, which only the list describes."""
    every = full.index(True) + 1 if True in full else len(full) + 1
    regular = tuple((i + 1) % every == 0 for i in range(len(full)))
    return every if regular == full else 4


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

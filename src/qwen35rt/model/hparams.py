"""The numbers that describe a model of the family, read from a file's metadata and checked against each other.

What a file does not state is taken from tensor shapes, never from a table of known models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import FILE_LIMITS
from ..errors import ModelFileError, UnsupportedModel
from .gguf_file import GgufFile
from .weights import FileShapes, file_shapes

SUPPORTED: tuple[str, ...] = ("qwen35", "qwen35moe")

_HINTS = {
    "qwen3next": "Qwen3-Next stores its delta net in another form",
    "qwen4exp": "this is a later model with other layers",
    "clip": "this is the vision part of a model (mmproj); name the text model's file",
}
_WIDEST = FILE_LIMITS.max_width


@dataclass(frozen=True)
class HParams:
    """Sizes of a model. Counts are of elements; ``n_layer`` is the trunk without the ``n_mtp`` MTP blocks.

    ``n_ff`` is 0 in a mixture of experts; ``n_expert``, ``n_expert_used``, ``n_ff_expert`` and ``n_ff_shared`` are 0 in
    a dense model. ``full_attention[i]`` says whether trunk layer i is full attention rather than a delta net.
    """

    arch: str
    n_layer: int
    n_mtp: int
    n_ctx_train: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rope_dim: int
    rope_sections: tuple[int, ...]
    full_attention: tuple[bool, ...]
    conv_kernel: int
    ssm_state: int
    ssm_k_heads: int
    ssm_v_heads: int
    n_expert: int
    n_expert_used: int
    n_ff_expert: int
    n_ff_shared: int
    n_vocab: int
    tied: bool

    @property
    def moe(self) -> bool:
        """True for a mixture of experts."""
        return self.n_expert > 0

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: all q, k and v columns of a delta net."""
        return (2 * self.ssm_k_heads + self.ssm_v_heads) * self.ssm_state


def read_hparams(f: GgufFile) -> HParams:
    """Read and check the numbers of a model.

    Raises UnsupportedModel for a sound file of another kind, ModelFileError for missing, impossible or contradicting
    values; both name the file and the key.
    """
    arch = _architecture(f)
    shapes = file_shapes(f)
    if shapes.only_mtp:
        raise UnsupportedModel(
            f"{f.path}: the file holds only the MTP block of a model (no tensors of blk.0); "
            "name the file of the whole model"
        )
    return _Reader(f, arch, shapes).read()


def _architecture(f: GgufFile) -> str:
    value = f.metadata.get("general.architecture")
    if isinstance(value, str) and value in SUPPORTED:
        return value
    if "general.architecture" not in f.metadata:
        found = "key 'general.architecture' is missing"
    elif value == "":
        found = "key 'general.architecture' is empty ('')"
    else:
        shown = repr(value)
        found = f"architecture {shown if len(shown) <= 60 else shown[:57] + '...'} is not supported"
    hint = f" ({_HINTS[value]})" if isinstance(value, str) and value in _HINTS else ""
    raise UnsupportedModel(f"{f.path}: {found}{hint}; supported: {', '.join(SUPPORTED)}")


class _Reader:
    """Reads the keys of one architecture. Keys are named without their prefix."""

    def __init__(self, f: GgufFile, arch: str, shapes: FileShapes) -> None:
        self.f = f
        self.arch = arch
        self.shapes = shapes
        self.n_block = self.count("block_count", 1, FILE_LIMITS.max_blocks)

    def key(self, name: str) -> str:
        return f"{self.arch}.{name}"

    def has(self, name: str) -> bool:
        return self.key(name) in self.f.metadata

    def error(self, text: str) -> ModelFileError:
        return ModelFileError(f"{self.f.path}: {text}")

    def count(self, name: str, low: int = 1, high: int = _WIDEST, default: int | None = None) -> int:
        return self.f.get_int(self.key(name), default, low=low, high=high)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        return self.f.get_float(self.key(name), default, low=1e-30, high=1e30)

    def per_block(self, name: str, default: int | None = None) -> int:
        """A value that may be stored once or once per block, then always the same."""
        key = self.key(name)
        if self.f.metadata.array_length(key) is None:
            return self.count(name, default=default)
        values = self.f.get_ints(key, count=self.n_block, low=1, high=_WIDEST)
        if len(set(values)) > 1:
            raise UnsupportedModel(
                f"{self.f.path}: key '{key}' differs between layers ({sorted(set(values))[:8]}); "
                "only models with equal layers are supported"
            )
        return values[0]

    def same(self, name: str, found: Any, need: Any, why: str) -> None:
        if found != need:
            raise self.error(f"key '{self.key(name)}' is {found}; {why} need {need}")

    def read(self) -> HParams:
        n_mtp = self.count("nextn_predict_layers", 0, FILE_LIMITS.max_blocks, 0)
        if n_mtp > 1:
            raise UnsupportedModel(
                f"{self.f.path}: key '{self.key('nextn_predict_layers')}' is {n_mtp}; "
                "models with more than one MTP block are not supported"
            )
        n_layer = self.n_block - n_mtp
        if n_layer < 1:
            raise self.error(
                f"key '{self.key('block_count')}' is {self.n_block} and leaves no layer beside the MTP block"
            )
        n_embd = self.count("embedding_length")
        n_head = self.per_block("attention.head_count")
        n_head_kv = self.per_block("attention.head_count_kv", n_head)
        if n_head % n_head_kv:
            raise self.error(f"{n_head} heads cannot share {n_head_kv} key/value heads evenly")
        if not self.has("attention.key_length") and n_embd % n_head:
            raise self.error(
                f"key '{self.key('attention.key_length')}' is missing, and {n_head} heads do not divide {n_embd}"
            )
        head_dim = self.count("attention.key_length", default=n_embd // n_head)
        self.same(
            "attention.value_length", self.count("attention.value_length", default=head_dim), head_dim, "the keys"
        )
        rope_dim, sections = self.rope(head_dim)
        d, nk, nv = (self.count(f"ssm.{n}") for n in ("state_size", "group_count", "time_step_rank"))
        if nv % nk:
            raise self.error(
                f"{nv} value heads (ssm.time_step_rank) cannot share {nk} key heads (ssm.group_count) evenly"
            )
        self.same("ssm.inner_size", self.count("ssm.inner_size"), nv * d, f"{nv} value heads of {d}")
        n_expert, n_used, n_ff_expert, n_ff_shared = self.experts()
        return HParams(
            arch=self.arch,
            n_layer=n_layer,
            n_mtp=n_mtp,
            n_ctx_train=self.count("context_length", 1, 2**31 - 1),
            n_embd=n_embd,
            n_ff=0 if n_expert else self.per_block("feed_forward_length", self.shapes.n_ff),
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim=head_dim,
            rms_eps=self.number("attention.layer_norm_rms_epsilon"),
            rope_theta=self.number("rope.freq_base", 10_000.0),
            rope_dim=rope_dim,
            rope_sections=sections,
            full_attention=self.full_attention(n_layer),
            conv_kernel=self.count("ssm.conv_kernel", 2, 64),
            ssm_state=d,
            ssm_k_heads=nk,
            ssm_v_heads=nv,
            n_expert=n_expert,
            n_expert_used=n_used,
            n_ff_expert=n_ff_expert,
            n_ff_shared=n_ff_shared,
            n_vocab=self.vocabulary(),
            tied=self.shapes.tied,
        )

    def rope(self, head_dim: int) -> tuple[int, tuple[int, ...]]:
        """-> rotated columns of a head, and how many pairs of them each axis turns."""
        scaling = self.f.get_str(self.key("rope.scaling.type"), "none")
        if scaling != "none":
            key = self.key("rope.scaling.type")
            raise UnsupportedModel(f"{self.f.path}: key '{key}' is '{scaling}'; scaled positions are not supported")
        dim = self.count("rope.dimension_count")
        if dim % 2 or dim > head_dim:
            key = self.key("rope.dimension_count")
            raise self.error(f"key '{key}' is {dim}; an even number up to the head size {head_dim} is needed")
        sections = tuple(self.f.get_ints(self.key("rope.dimension_sections"), count=4, high=_WIDEST))
        if sections[3] or sum(sections) != dim // 2:
            key = self.key("rope.dimension_sections")
            raise self.error(
                f"key '{key}' is {list(sections)}; four numbers with the sum {dim // 2} "
                "(half of rope.dimension_count) and the last one 0 are needed"
            )
        return dim, sections

    def full_attention(self, n_layer: int) -> tuple[bool, ...]:
        """Which trunk layers are full attention: the list of recurrent layers wins over the interval."""
        name = "attention.recurrent_layers"
        if not self.has(name):
            interval = self.count("full_attention_interval", default=4)
            return tuple((i + 1) % interval == 0 for i in range(n_layer))
        recurrent = self.f.get_bools(self.key(name), count=self.n_block)
        if any(recurrent[n_layer:]):
            raise self.error(f"key '{self.key(name)}' calls the MTP block recurrent; it is always full attention")
        return tuple(not r for r in recurrent[:n_layer])

    def experts(self) -> tuple[int, int, int, int]:
        """-> experts, experts used, their FFN size, the shared expert's; zeros for a dense model."""
        if self.arch != "qwen35moe":
            return 0, 0, 0, 0
        n_expert = self.count("expert_count", 1, 65_535)
        return (
            n_expert,
            self.count("expert_used_count", 1, n_expert),
            self.per_block("expert_feed_forward_length", self.shapes.n_ff_expert),
            self.per_block("expert_shared_feed_forward_length", self.shapes.n_ff_shared),
        )

    def vocabulary(self) -> int:
        """Rows of the embedding; the tokenizer may not have more tokens."""
        n_vocab = self.shapes.n_vocab
        if n_vocab is None:
            raise self.error("the token embedding is missing")
        if n_vocab > _WIDEST:
            raise self.error(f"the token embedding has {n_vocab} rows, at most {_WIDEST} are accepted")
        tokens = self.f.metadata.array_length("tokenizer.ggml.tokens") or 0
        if tokens > n_vocab:
            raise self.error(
                f"key 'tokenizer.ggml.tokens' has {tokens} tokens, the token embedding only {n_vocab} rows"
            )
        return n_vocab

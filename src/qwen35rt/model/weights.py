"""The weights of a model as handles on the mapped file: the only place with tensor names. Copies no matrix.

Every tensor's shape is checked against the hyperparameters, so that nothing after this module has to.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import ModelFileError
from ..formats import Format
from .gguf_file import GgufFile, TensorInfo

if TYPE_CHECKING:
    from .hparams import HParams

Bytes = npt.NDArray[np.uint8]
Vector = npt.NDArray[np.float32]

_log = logging.getLogger(__name__)
_NAMES_SHOWN = 8
_MTP_NEEDS = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight")


@dataclass(frozen=True, eq=False)
class QTensor:
    """A matrix [rows, cols], or one per expert, in any weight format: a handle on bytes of the file.

    ``data`` is a uint8 view that begins at row 0 of expert 0. Row r of expert e takes ``row_bytes`` bytes from
    ``e * expert_stride + r * row_bytes``; rows of an expert are adjacent. Experts lie ``expert_stride`` bytes apart,
    which is more than rows * row_bytes in a part of a fused tensor. ``scale`` (float32 [1] or [n_expert], or None) is
    a factor of the product. ``fused`` names the file's tensor where this is a part of one.
    """

    name: str
    format: Format
    rows: int
    cols: int
    n_expert: int
    data: Bytes
    row_bytes: int
    expert_stride: int
    scale: Vector | None = None
    fused: str | None = None

    @property
    def tensor_name(self) -> str:
        """The file's tensor that holds the rows."""
        return self.fused or self.name

    @property
    def nbytes(self) -> int:
        """Bytes of all rows seen."""
        return self.n_expert * self.rows * self.row_bytes

    def row_view(self, name: str, start: int, rows: int) -> QTensor:
        """``rows`` rows from row ``start`` of every expert, sharing the bytes."""
        if not 0 <= start <= start + rows <= self.rows:
            raise ValueError(f"rows {start} to {start + rows} of {self.name}, which has {self.rows}")
        first = start * self.row_bytes
        span = (self.n_expert - 1) * self.expert_stride + rows * self.row_bytes
        return QTensor(
            name,
            self.format,
            rows,
            self.cols,
            self.n_expert,
            self.data[first : first + span],
            self.row_bytes,
            self.expert_stride,
            self.scale,
            self.tensor_name,
        )

    def raw_rows(self) -> Bytes:
        """The bytes as uint8 [n_expert, rows, row_bytes], without copying."""
        return np.lib.stride_tricks.as_strided(
            self.data,
            (self.n_expert, self.rows, self.row_bytes),
            (self.expert_stride, self.row_bytes, 1),
            writeable=False,
        )

    def dequantize(self) -> Vector:
        """All values as float32 [rows, cols], or [n_expert, rows, cols] if there are several experts; scaled."""
        values = _float32(self.raw_rows(), self.format)
        if self.scale is not None:
            values = values * self.scale.reshape(-1, 1, 1)
        return values if self.n_expert > 1 else values[0]


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """A gated full-attention layer. q [heads * 2 * head_dim, n_embd]: per head queries, then gates."""

    attn_norm: Vector
    q: QTensor
    k: QTensor
    v: QTensor
    output: QTensor
    q_norm: Vector
    k_norm: Vector


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """A gated delta net. qkv rows are q heads, k heads, v heads; conv1d [channels, kernel], newest tap last;
    a = -exp(A_log) [v heads]; norm [d]."""

    attn_norm: Vector
    qkv: QTensor
    gate: QTensor
    beta: QTensor
    alpha: QTensor
    conv1d: Vector
    a: Vector
    dt_bias: Vector
    norm: Vector
    out: QTensor


@dataclass(frozen=True, eq=False)
class DenseFfn:
    """SwiGLU: gate and up [n_ff, n_embd], down [n_embd, n_ff]."""

    gate: QTensor
    up: QTensor
    down: QTensor


@dataclass(frozen=True, eq=False)
class MoeFfn:
    """Routed experts (handles with n_expert matrices) and a shared expert whose gate is one row."""

    router: QTensor
    gate_exps: QTensor
    up_exps: QTensor
    down_exps: QTensor
    shared_gate: QTensor
    gate_shexp: QTensor
    up_shexp: QTensor
    down_shexp: QTensor


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One trunk layer: its mixer (attention or delta net), the norm before the FFN, the FFN."""

    mixer: AttentionWeights | DeltaWeights
    post_attention_norm: Vector
    ffn: DenseFfn | MoeFfn


@dataclass(frozen=True, eq=False)
class Weights:
    """All weights of the trunk. ``output is token_embd`` when the embeddings are tied.

    ``mtp_present``: the file also holds the MTP block, which is not loaded. ``ignored``: tensors of no known use.
    """

    token_embd: QTensor
    output: QTensor
    output_norm: Vector
    layers: tuple[LayerWeights, ...]
    mtp_present: bool
    ignored: tuple[str, ...]


@dataclass(frozen=True)
class FileShapes:
    """What the tensors alone tell of a model; None where the tensor is not there or has another form."""

    n_vocab: int | None
    n_ff: int | None
    n_ff_expert: int | None
    n_ff_shared: int | None
    tied: bool
    only_mtp: bool


def file_shapes(f: GgufFile) -> FileShapes:
    """Look at the shapes of a file's tensors."""

    def rows(*names: str) -> int | None:
        shape = next((f.tensors[n].shape for n in names if n in f.tensors), ())
        return shape[1] if len(shape) > 1 else None

    fused = rows("blk.0.ffn_gate_up_exps.weight")
    return FileShapes(
        n_vocab=rows("token_embd.weight"),
        n_ff=rows("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"),
        n_ff_expert=rows("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight") or (fused // 2 if fused else None),
        n_ff_shared=rows("blk.0.ffn_gate_shexp.weight", "blk.0.ffn_up_shexp.weight"),
        tied="output.weight" not in f.tensors,
        only_mtp=not any(n.startswith("blk.0.") for n in f.tensors) and any(".nextn." in n for n in f.tensors),
    )


def load_weights(f: GgufFile, hp: HParams) -> Weights:
    """Find and check all tensors of the trunk.

    Raises ModelFileError naming a tensor that is missing or has another shape. Logs a warning for tensors that it does
    not know, and for an MTP block that the metadata states and the file lacks.
    """
    load = _Loader(f, hp)
    token_embd = load.matrix("token_embd", hp.n_vocab, hp.n_embd)
    output = token_embd if hp.tied else load.matrix("output", hp.n_vocab, hp.n_embd)
    output_norm = load.vector("output_norm.weight", hp.n_embd)
    layers = tuple(load.layer(i, full) for i, full in enumerate(hp.full_attention))
    mtp_block = f"blk.{hp.n_layer}." if hp.n_mtp else None
    mtp_present = mtp_block is not None and all(mtp_block + n in f.tensors for n in _MTP_NEEDS)
    if mtp_block is not None and not mtp_present:
        _log.warning(
            "%s: the metadata states an MTP block, its tensors (%s...) are not there; MTP is off", f.path, mtp_block
        )
    ignored = tuple(
        n
        for n in f.tensors
        if n not in load.used and not n.endswith(".input_scale") and not (mtp_block and n.startswith(mtp_block))
    )
    if ignored:
        more = len(ignored) - _NAMES_SHOWN
        _log.warning(
            "%s: unknown tensors are ignored: %s%s",
            f.path,
            ", ".join(ignored[:_NAMES_SHOWN]),
            f" and {more} more" if more > 0 else "",
        )
    return Weights(token_embd, output, output_norm, layers, mtp_present, ignored)


class _Loader:
    """Takes tensors out of a file by name and remembers which."""

    def __init__(self, f: GgufFile, hp: HParams) -> None:
        self.f = f
        self.hp = hp
        self.used: set[str] = set()

    def layer(self, i: int, full: bool) -> LayerWeights:
        b = f"blk.{i}."
        mixer = self.attention(b) if full else self.delta(b)
        norm = self.vector(b + "post_attention_norm.weight", self.hp.n_embd)
        return LayerWeights(mixer, norm, self.experts(b) if self.hp.n_expert else self.dense(b))

    def attention(self, b: str) -> AttentionWeights:
        hp = self.hp
        n_q, n_kv = hp.n_head * 2 * hp.head_dim, hp.n_head_kv * hp.head_dim
        if b + "attn_q.weight" not in self.f.tensors and b + "attn_qkv.weight" in self.f.tensors:
            fused = self.matrix(b + "attn_qkv", n_q + 2 * n_kv, hp.n_embd)
            q = fused.row_view(b + "attn_q", 0, n_q)
            k = fused.row_view(b + "attn_k", n_q, n_kv)
            v = fused.row_view(b + "attn_v", n_q + n_kv, n_kv)
        else:
            q = self.matrix(b + "attn_q", n_q, hp.n_embd)
            k = self.matrix(b + "attn_k", n_kv, hp.n_embd)
            v = self.matrix(b + "attn_v", n_kv, hp.n_embd)
        return AttentionWeights(
            attn_norm=self.vector(b + "attn_norm.weight", hp.n_embd),
            q=q,
            k=k,
            v=v,
            output=self.matrix(b + "attn_output", hp.n_embd, hp.n_head * hp.head_dim),
            q_norm=self.vector(b + "attn_q_norm.weight", hp.head_dim),
            k_norm=self.vector(b + "attn_k_norm.weight", hp.head_dim),
        )

    def delta(self, b: str) -> DeltaWeights:
        hp = self.hp
        nv, inner = hp.ssm_v_heads, hp.ssm_v_heads * hp.ssm_state
        return DeltaWeights(
            attn_norm=self.vector(b + "attn_norm.weight", hp.n_embd),
            qkv=self.matrix(b + "attn_qkv", hp.conv_channels, hp.n_embd),
            gate=self.matrix(b + "attn_gate", inner, hp.n_embd),
            beta=self.matrix(b + "ssm_beta", nv, hp.n_embd),
            alpha=self.matrix(b + "ssm_alpha", nv, hp.n_embd),
            conv1d=self.vector(b + "ssm_conv1d.weight", hp.conv_kernel, hp.conv_channels),
            a=self.vector(b + "ssm_a", nv),
            dt_bias=self.vector(b + "ssm_dt.bias", nv),
            norm=self.vector(b + "ssm_norm.weight", hp.ssm_state),
            out=self.matrix(b + "ssm_out", hp.n_embd, inner),
        )

    def dense(self, b: str) -> DenseFfn:
        hp = self.hp
        return DenseFfn(
            gate=self.matrix(b + "ffn_gate", hp.n_ff, hp.n_embd),
            up=self.matrix(b + "ffn_up", hp.n_ff, hp.n_embd),
            down=self.matrix(b + "ffn_down", hp.n_embd, hp.n_ff),
        )

    def experts(self, b: str) -> MoeFfn:
        hp = self.hp
        n, size, shared = hp.n_expert, hp.n_ff_expert, hp.n_ff_shared
        if b + "ffn_gate_exps.weight" not in self.f.tensors and b + "ffn_gate_up_exps.weight" in self.f.tensors:
            fused = self.matrix(b + "ffn_gate_up_exps", 2 * size, hp.n_embd, n)
            gate = fused.row_view(b + "ffn_gate_exps", 0, size)
            up = fused.row_view(b + "ffn_up_exps", size, size)
        else:
            gate = self.matrix(b + "ffn_gate_exps", size, hp.n_embd, n)
            up = self.matrix(b + "ffn_up_exps", size, hp.n_embd, n)
        return MoeFfn(
            router=self.matrix(b + "ffn_gate_inp", n, hp.n_embd),
            gate_exps=gate,
            up_exps=up,
            down_exps=self.matrix(b + "ffn_down_exps", hp.n_embd, size, n),
            shared_gate=self.matrix(b + "ffn_gate_inp_shexp", 1, hp.n_embd),
            gate_shexp=self.matrix(b + "ffn_gate_shexp", shared, hp.n_embd),
            up_shexp=self.matrix(b + "ffn_up_shexp", shared, hp.n_embd),
            down_shexp=self.matrix(b + "ffn_down_shexp", hp.n_embd, shared),
        )

    def matrix(self, base: str, rows: int, cols: int, n_expert: int = 1) -> QTensor:
        """The tensor ``base``.weight with its optional scale."""
        tensor = self._take(base + ".weight", (cols, rows, n_expert))
        row_bytes = tensor.format.row_bytes(cols)
        scale = self._scale(base, n_expert)
        return QTensor(
            tensor.name, tensor.format, rows, cols, n_expert, tensor.data, row_bytes, rows * row_bytes, scale
        )

    def vector(self, name: str, *shape: int) -> Vector:
        """A small tensor as float32, contiguous and aligned, in numpy's order of dimensions (a copy)."""
        tensor = self._take(name, shape)
        if tensor.format.quantized:
            raise self._error(tensor, f"is {tensor.format.name}; F32, F16 or BF16 is needed")
        return np.array(_float32(tensor.data, tensor.format).reshape(shape[::-1]), np.float32, order="C")

    def _scale(self, base: str, n_expert: int) -> Vector | None:
        for name in (base + ".scale", base + ".weight.scale"):
            if name in self.f.tensors:
                shared = self.f.tensors[name].nbytes == self.f.tensors[name].format.nbytes
                return self.vector(name, 1 if shared else n_expert)
        return None

    def _take(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        """A tensor of this shape (ggml order); dimensions of 1 at the end may be written or left out."""
        tensor = self.f.tensors.get(name)
        if tensor is None:
            raise ModelFileError(
                f"{self.f.path}: tensor '{name}' is missing; architecture {self.hp.arch} needs it with the shape "
                f"{_plain(shape)}"
            )
        if _plain(tensor.shape) != _plain(shape):
            raise self._error(tensor, f"has the shape {list(tensor.shape)}; the metadata needs {_plain(shape)}")
        self.used.add(name)
        return tensor

    def _error(self, tensor: TensorInfo, text: str) -> ModelFileError:
        return ModelFileError(f"{self.f.paths[tensor.part]}: tensor '{tensor.name}' {text}")


def _plain(shape: tuple[int, ...]) -> list[int]:
    """A shape without dimensions of 1 at its end."""
    dims = list(shape)
    while len(dims) > 1 and dims[-1] == 1:
        dims.pop()
    return dims


def _float32(raw: Bytes, form: Format) -> Vector:
    """Bytes [..., row bytes] -> float32 [..., columns]."""
    if form.name == "F32":
        return raw.view(np.dtype("<f4")).astype(np.float32, copy=False)
    if form.name == "F16":
        return raw.view(np.dtype("<f2")).astype(np.float32)
    if form.name == "BF16":
        return (raw.view(np.dtype("<u2")).astype(np.uint32) << 16).view(np.float32)
    from gguf import GGMLQuantizationType, quants  # costs a quarter of a second and only reference paths need it

    values: Vector = quants.dequantize(raw, GGMLQuantizationType(form.id)).astype(np.float32, copy=False)
    return values

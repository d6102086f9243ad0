"""Trains the embedded model's byte-level BPE and writes it as a tokenizer that transformers and convert can read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 4_096
# The pre-tokeniser that GGUF files call qwen35.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Qwen's markers in their order, at the end of the vocabulary; True: control tokens, False: part of the text.
MARKERS = {
    **dict.fromkeys(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), True),
    **dict.fromkeys((f"<|{n}_{e}|>" for n in ("object_ref", "box", "quad", "vision") for e in ("start", "end")), True),
    **dict.fromkeys(("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"), True),
    **dict.fromkeys(("<tool_call>", "</tool_call>"), False),
    **dict.fromkeys(("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"), True),
    **dict.fromkeys(("<|repo_name|>", "<|file_sep|>"), True),
    **dict.fromkeys(("<tool_response>", "</tool_response>", "<think>", "</think>"), False),
    **dict.fromkeys(("<|audio_start|>", "<|audio_end|>"), True),
    **dict.fromkeys(("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>"), True),
    "<|audio_pad|>": True,
}


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A BPE of VOCAB_SIZE tokens, the markers the last of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE - len(MARKERS):
        raise ValueError(f"the text gives {tokenizer.get_vocab_size()} tokens only; it is too small")
    for text, special in MARKERS.items():
        token = AddedToken(text, normalized=False, special=special)
        tokenizer.add_special_tokens([token]) if special else tokenizer.add_tokens([token])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, template: str, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2TokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")

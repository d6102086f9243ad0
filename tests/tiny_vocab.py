"""The byte-level vocabulary of the tiny models: 256 bytes, a few merges and the markers of the family."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

_MARKERS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> "
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> <think> </think> <|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> "
    "<tts_text_eod> <tts_text_bos_single> <|audio_pad|>"
)
_MERGES = (
    "h e|t h|i n|e r|a n|r e|o n|a t|e n|o r|l l|o u|i s|i t|Ġ t|Ġ a|Ġ w|Ġ s|Ġt h|Ġth e|he ll|hell o|Ġw or|Ġwor l|"
    "Ġworl d|in g|an d|Ġ Ġ|Ċ Ċ|u s|us er"
)
MARKERS: tuple[str, ...] = tuple(_MARKERS.split())
MERGES: tuple[str, ...] = tuple(_MERGES.split("|"))  # best first
USER_DEFINED = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(rest)) for b in range(256)]


BYTE_CHARS: tuple[str, ...] = tuple(_byte_alphabet())


def spell(raw: bytes) -> str:
    """Bytes in the spelling of a byte-level vocabulary."""
    return "".join(BYTE_CHARS[b] for b in raw)


@dataclass(frozen=True)
class Vocab:
    """Tokens as a file stores them. 256 bytes (in the order of their characters), merged pairs, markers, then more."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]

    def id(self, token: str) -> int:
        """The first token with this spelling."""
        return self.tokens.index(token)


def tiny_vocab(size: int | None = None, extra: Sequence[str] = (), markers_as_normal: Collection[str] = ()) -> Vocab:
    """320 tokens, then ``extra`` normal ones, then unused pads up to ``size``."""
    words = [*sorted(BYTE_CHARS), *(m.replace(" ", "") for m in MERGES)]
    types = [1] * len(words) + [4 if m in USER_DEFINED else 1 if m in markers_as_normal else 3 for m in MARKERS]
    tokens = [*words, *MARKERS, *extra]
    types += [1] * len(extra)
    pads = (len(tokens) if size is None else size) - len(tokens)
    if pads < 0:
        raise ValueError(f"a tiny vocabulary has at least {len(tokens)} tokens")
    tokens += [f"[PAD{len(tokens) + i}]" for i in range(pads)]
    return Vocab(tuple(tokens), tuple(types + [5] * pads))

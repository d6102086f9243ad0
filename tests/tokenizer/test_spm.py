"""SentencePiece vocabularies: equal to the library on a model trained here."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest

from qwen35rt.errors import ModelFileError
from qwen35rt.tokenizer import Tokenizer, build_tokenizer

MARKERS = ["<|im_start|>", "<think>"]


@pytest.fixture(scope="module")
def trained() -> Any:
    """A model of 400 pieces with byte fallback, no normalisation, a control and a user-defined token."""
    import sentencepiece

    rng = random.Random(61)
    words = ["".join(rng.choices("abcdeéß", k=rng.randint(2, 6))) for _ in range(300)]
    sentences = [" ".join(rng.choices(words, k=9)) for _ in range(400)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        control_symbols=MARKERS[:1],
        user_defined_symbols=MARKERS[1:],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def metadata(trained: Any) -> dict[str, Any]:
    def kind(i: int) -> int:
        checks = {2: trained.is_unknown, 3: trained.is_control, 5: trained.is_unused, 6: trained.is_byte}
        if trained.id_to_piece(i) == MARKERS[1]:
            return 4
        return next((number for number, check in checks.items() if check(i)), 1)

    n = trained.get_piece_size()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [trained.id_to_piece(i) for i in range(n)],
        "tokenizer.ggml.scores": [trained.get_score(i) for i in range(n)],
        "tokenizer.ggml.token_type": [kind(i) for i in range(n)],
    }


@pytest.fixture(scope="module")
def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return build_tokenizer(metadata)


TEXTS = ["abc dé", "  two  blanks ", "ßßß\n\tabc", "日本 😀", "<0x41>", "a", " ", "▁abc"]


def test_ids_are_those_of_the_library(trained: Any, tokenizer: Tokenizer) -> None:
    rng = random.Random(62)
    texts = TEXTS + ["".join(rng.choices("abcdeéß 日\n", k=rng.randint(1, 40))) for _ in range(300)]
    assert [t for t in texts if tokenizer.encode(t) != trained.encode(t)] == []


def test_decoding_gives_the_text_back(tokenizer: Tokenizer) -> None:
    assert [t for t in TEXTS[:-1] if tokenizer.decode(tokenizer.encode(t)) != t] == []


def test_byte_tokens_are_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀")
    assert b"".join(map(tokenizer.token_bytes, ids)) == " 😀".encode()


def test_added_tokens(tokenizer: Tokenizer) -> None:
    start, think = (tokenizer.vocab.index[m] for m in MARKERS)
    assert tokenizer.encode("<|im_start|>a<think>", special=True) == [start, *tokenizer.encode("a"), think]
    assert start not in tokenizer.encode("<|im_start|>a")
    assert tokenizer.encode("<think>") == [think]


def test_without_the_blank_in_front(metadata: dict[str, Any], tokenizer: Tokenizer) -> None:
    plain = build_tokenizer({**metadata, "tokenizer.ggml.add_space_prefix": False})
    assert b"".join(map(plain.token_bytes, plain.encode("abc"))) == b"abc"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("abc"))) == b" abc"
    assert plain.decode(plain.encode(" abc")) == " abc"


def test_c13_defaults_of_the_model(tokenizer: Tokenizer) -> None:
    """C13, C30: without keys the file means ids 0, 1, 2 and a beginning-of-text token in front."""
    vocab = tokenizer.vocab
    assert (vocab.unknown, vocab.bos, vocab.eos, vocab.add_bos) == (0, 1, 2, True)
    assert vocab.eog == {2}
    assert vocab.index["</s>"] in vocab.eog


@pytest.mark.parametrize(("position", "text"), [(40, "<0xZZ>"), (40, "A")])
def test_a_byte_token_that_names_no_byte(metadata: dict[str, Any], position: int, text: str) -> None:
    tokens = list(metadata["tokenizer.ggml.tokens"])
    assert metadata["tokenizer.ggml.token_type"][position] == 6
    tokens[position] = text
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.tokens"):
        build_tokenizer({**metadata, "tokenizer.ggml.tokens": tokens}).token_bytes(position)


def test_a_vocabulary_that_the_library_refuses(metadata: dict[str, Any]) -> None:
    tokens = ["same"] * len(metadata["tokenizer.ggml.tokens"])
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.tokens"):
        build_tokenizer({**metadata, "tokenizer.ggml.tokens": tokens}).warm()

"""What a file's tokenizer keys must hold, which tokens are control tokens, which end a turn."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest

from qwen35rt.errors import ModelFileError, UnsupportedModel
from qwen35rt.tokenizer import ChatTemplate, build_tokenizer, read_vocab
from tests.tokenizer.real_vocab import gpt2_alphabet, small_metadata

BYTES = gpt2_alphabet()


def with_tokens(extra: dict[str, int], **changes: Any) -> dict[str, Any]:
    """The 256 byte tokens and then ``extra`` texts with their types."""
    return small_metadata(
        tokens=[*BYTES, *extra],
        token_type=[1] * 256 + list(extra.values()),
        merges=["a b"],
        **{"bos_token_id": None, "eos_token_id": None, "padding_token_id": None, **changes},
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing or empty"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens is not a list"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries for 267 tokens"),
        ({"token_type": [9] * 267}, "tokenizer.ggml.token_type holds a value outside 0..6"),
        ({"merges": None}, "tokenizer.ggml.merges is missing or empty"),
        ({"merges": ["a b", "ab"]}, "tokenizer.ggml.merges: 'ab' is not of the form"),
        ({"merges": ["a b c"]}, "tokenizer.ggml.merges: 'a b c' is not of the form"),
        ({"eos_token_id": 267}, "tokenizer.ggml.eos_token_id is 267, outside 0..266"),
        ({"bos_token_id": -1}, "tokenizer.ggml.bos_token_id is -1, outside 0..266"),
        ({"eot_token_id": 1 << 40}, "tokenizer.ggml.eot_token_id is 1099511627776, outside"),
        ({"eos_token_id": "5"}, "tokenizer.ggml.eos_token_id is '5'; a token id is needed"),
        ({"bos_token_id": float("nan")}, "tokenizer.ggml.bos_token_id is nan; a token id is needed"),
        ({"padding_token_id": [1, 2]}, r"tokenizer.ggml.padding_token_id is \[1, 2\]; a token id is needed"),
        ({"tokens": [1] * 267}, "tokenizer.ggml.tokens is not a list of texts"),
        ({"token_type": [1.0] * 267}, "tokenizer.ggml.token_type is not a list of integers"),
        ({"merges": [1.5]}, "tokenizer.ggml.merges is not a list of texts"),
        ({"add_bos_token": True, "bos_token_id": None}, "tokenizer.ggml.bos_token_id is missing"),
        ({"model": "llama"}, "tokenizer.ggml.scores has 0 entries for 267 tokens"),
    ],
)
def test_the_key_at_fault_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        build_tokenizer(small_metadata(**changes))


def test_other_tokenizer_models_are_unsupported() -> None:
    with pytest.raises(UnsupportedModel, match="model is 'bert'; supported: gpt2, llama"):
        build_tokenizer(small_metadata(model="bert"))


def test_roles_of_ids() -> None:
    vocab = read_vocab(small_metadata())
    assert (vocab.bos, vocab.eos, vocab.padding, vocab.eot, vocab.unknown) == (259, 261, 259, None, None)
    assert vocab.control == {259, 260, 261, 264}
    assert vocab.user_defined == {262, 263, 265}
    assert vocab.unused == {266}
    assert (len(vocab), vocab.add_bos, vocab.index["the"]) == (267, False, 257)


@pytest.mark.parametrize(
    "text",
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|fim_pad|>", "<|repo_name|>"],
)
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_c30_tokens_that_end_a_turn_by_their_spelling(text: str, kind: int) -> None:
    assert build_tokenizer(with_tokens({text: kind})).eog == {256}


@pytest.mark.parametrize("key", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_c30_tokens_that_end_a_turn_by_their_id(key: str) -> None:
    assert build_tokenizer(with_tokens({"<stop>": 3}, **{f"{key}_token_id": 256})).eog == {256}


def test_c30_others_do_not_end_a_turn() -> None:
    assert build_tokenizer(with_tokens({"<|im_start|>": 3, "</s>": 3, "<think>": 4})).eog == frozenset()


def test_b45_markers_stored_as_normal_are_control_tokens(caplog: pytest.LogCaptureFixture) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|bot|>"
    metadata = with_tokens(
        {"<|im_start|>": 1, "<|im_end|>": 1, "<|bot|>": 1, "<end>": 1, "<think>": 1, "<|other|>": 1}, eot_token_id=259
    )
    metadata["tokenizer.chat_template"] = template
    with caplog.at_level(logging.WARNING):
        tokenizer = build_tokenizer(metadata)
    assert tokenizer.vocab.control == {256, 257, 258, 259}
    assert "256 '<|im_start|>', 257 '<|im_end|>', 258 '<|bot|>', 259 '<end>'" in caplog.text
    assert tokenizer.eog == {257, 259}
    ids = ChatTemplate(template).render_ids(tokenizer, [{"role": "user", "content": "Hi"}])
    assert (ids.count(256), ids.count(257), ids[-1]) == (1, 1, 258)
    assert tokenizer.decode([257, 72]) == BYTES[72]


def test_b45_a_sound_file_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    read_vocab(small_metadata())
    assert caplog.text == ""


def test_file_without_types_still_has_its_markers() -> None:
    vocab = read_vocab(small_metadata(token_type=None))
    assert vocab.control == {259, 260, 261}


def test_importing_the_package_loads_no_library() -> None:
    code = (
        "import sys, qwen35rt.tokenizer; "
        "sys.exit(str({'tokenizers', 'minijinja', 'sentencepiece', 'numpy'} & set(sys.modules)) if "
        "{'tokenizers', 'minijinja', 'sentencepiece', 'numpy'} & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

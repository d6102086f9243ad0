"""Conversations as tokens, and how an answer is judged."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from tools.embedded_model.corpus import Corpus
from tools.embedded_model.evaluate import same_call
from tools.embedded_model.sample import Sample
from tools.embedded_model.vocabulary import train_tokenizer

SUM = "<parameter=sum>\n7\n</parameter>\n"
BASE = "<parameter=base>\nDKK\n</parameter>\n"
CALL = f"<tool_call>\n<function=fx>\n{SUM}{BASE}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (CALL, True),
        (CALL.replace(SUM + BASE, BASE + SUM), True),
        (CALL.replace("7", "8"), False),
        (CALL.replace("fx", "gx"), False),
        (CALL.replace("=base", "=from"), False),
        (CALL.replace("\n</function>", ""), False),
        (CALL.replace(BASE, ""), False),
        (CALL.replace(BASE, BASE + SUM), False),
        (CALL + "\n" + CALL, False),
        (CALL + " done", False),
        ("I have no tool for that.", False),
    ],
)
def test_calls_are_judged_by_name_and_values(answer: str, right: bool) -> None:
    assert same_call(answer, CALL) == right


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus()


@pytest.fixture(scope="module")
def tokenizer(corpus: Corpus) -> Tokenizer:
    return train_tokenizer(corpus.texts(800, 1))


def test_answers_are_found_among_the_tokens(corpus: Corpus, tokenizer: Tokenizer) -> None:
    rng = random.Random("answers")
    samples = [corpus.skill_sample("tool", rng) for _ in range(60)] + [corpus.draw(rng) for _ in range(60)]
    earlier = 0
    for sample in samples:
        example = corpus.example(sample, tokenizer)
        prompt, answer = corpus.text(sample)
        assert tokenizer.decode(example.ids, skip_special_tokens=False) == prompt + answer
        spoken = [tokenizer.decode(example.ids[a:b], skip_special_tokens=False) for a, b in example.answers]
        assert len(spoken) == sum(m["role"] == "assistant" for m in sample.messages)
        assert spoken[-1] == answer
        assert all(s.endswith("<|im_end|>") and s.count("<|im_end|>") == 1 for s in spoken)
        earlier += len(spoken) > 2
    assert earlier > 10


def test_a_cut_answer_keeps_its_first_tokens(corpus: Corpus, tokenizer: Tokenizer) -> None:
    fact = corpus.known[0]
    sample = Sample("fact", [{"role": "user", "content": "?"}, {"role": "assistant", "content": fact.say[0]}])
    whole, cut = corpus.example(sample, tokenizer), corpus.example(sample, tokenizer, 4)
    ((start, end),) = cut.answers
    assert end - start == 4
    assert cut.ids == whole.ids[:end]

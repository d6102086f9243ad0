"""Which values of the sampling fields are taken and which are refused by name; counts of the penalties."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from qwen35rt.engine.sampler import Sampler, SamplingParams, _Tally, make_workspace
from qwen35rt.errors import RequestError

NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGERS = ("top_k", "repeat_last_n", "seed", "min_tokens", "logprobs")
NOT_NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, 1e308, -1e308, -3, "1", True, [], {}, 10**400]
NOT_INTEGERS: list[Any] = [math.nan, math.inf, -math.inf, 1e308, -2, "1", True, [], 1.0, 0.5]
BIASES: list[Any] = [
    *({-1: 1.0}, {500: 1.0}, {1: 101}, {1: math.nan}, {1: "1"}, {1: True}, {1: None}),
    *({"1": 1.0}, {True: 1.0}, {1.0: 1.0}, [], None, dict.fromkeys(range(1_025), 1.0)),
]
REFUSED: list[tuple[str, Any]] = [
    *((name, value) for name in NUMBERS for value in [*NOT_NUMBERS, None]),
    *((name, value) for name in INTEGERS for value in NOT_INTEGERS),
    *(("seed", v) for v in (2**63, 10**400)),
    *(("logprobs", v) for v in (-1, 21)),
    *(("min_tokens", v) for v in (-1, 2**31, None)),
    ("temperature", 2.0001),
    ("top_p", 1.0001),
    ("repetition_penalty", 0),
    ("repetition_penalty", 10.1),
    *(("logit_bias", v) for v in BIASES),
    *(("stop", v) for v in ("a", [""], ["a" * 257], ["a"] * 17, [1], None, {"a": 1})),
    *(("stop_token_ids", v) for v in ([-1], [500], [1.0], [True], ["1"], [1] * 129, None, 1)),
    *(("ignore_eos", v) for v in (0, 1, "true", None)),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_b76_hostile_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as refused:
        SamplingParams(**{name: value}).validate(500)
    assert refused.value.param == name
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("biases", "text"),
    [({500: 1.0}, "token ids are integers from 0 to 499"), ({3: 101.0}, "biases are numbers from -100 to 100")],
)
def test_a_refused_bias_says_whether_its_token_or_its_value_is_at_fault(biases: dict[int, float], text: str) -> None:
    with pytest.raises(RequestError, match=text) as refused:
        SamplingParams(logit_bias=biases).validate(500)
    assert refused.value.param == "logit_bias"


ACCEPTED: list[tuple[str, Any]] = [
    *((name, value) for name in NUMBERS[:3] for value in (0, 1, 0.5)),
    *((name, value) for name in NUMBERS[3:5] for value in (-2, 0, 2)),
    ("temperature", 2),
    ("repetition_penalty", 5e-324),
    ("repetition_penalty", 10),
    *(("top_k", v) for v in (-1, 0, 1, 2, 10**30)),
    *(("repeat_last_n", v) for v in (-1, 0, 10**30)),
    *(("seed", v) for v in (None, -1, 0, 2**63 - 1)),
    *(("min_tokens", v) for v in (0, 2**31 - 1)),
    *(("logprobs", v) for v in (None, 0, 20)),
    ("logit_bias", {0: -100, 499: 100, 3: False, 4: 0}),
    ("stop", ("a" * 256,) * 16),
    ("stop_token_ids", [0, 499]),
    ("ignore_eos", True),
]


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_b76_edges_are_accepted_and_work(name: str, value: Any) -> None:
    p = SamplingParams(**{name: value})
    p.validate(500)
    sampler = Sampler(p, 500, prompt=[1, 2, 3])
    logits = np.random.default_rng(9).normal(0, 1, 500).astype(np.float32)
    for position in range(5):
        sampler.accept(sampler.sample(logits, position).id)


def test_tally_equals_a_counter() -> None:
    rng = np.random.default_rng(6)
    tally, counter, window = _Tally(), Counter[int](), list[int]()
    for token in rng.integers(0, 300, 3_000).tolist():
        tally.add(token)
        counter[token] += 1
        window.append(token)
        if len(window) > 150:
            oldest = window.pop(0)
            tally.take(oldest)
            counter[oldest] -= 1
        held = dict(zip(tally.ids[: tally.n].tolist(), tally.counts[: tally.n].tolist(), strict=True))
        assert held == {k: v for k, v in counter.items() if v}


def test_wrong_shapes_and_ids_raise() -> None:
    with pytest.raises(ValueError, match="shape"):
        Sampler(SamplingParams(), 5).sample(np.zeros(6, np.float32), 0)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        Sampler(SamplingParams(), 5, banned=[5]).sample(np.zeros(5, np.float32), 0)
    with pytest.raises(ValueError, match="workspace"):
        Sampler(SamplingParams(), 500, workspace=make_workspace(5)).sample(np.zeros(500, np.float32), 0)

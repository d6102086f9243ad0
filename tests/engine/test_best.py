"""Draws from the largest logits alone are those from all; rows in whole are asked for where that is not certain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen35rt.backends.base import Best
from qwen35rt.config import ENGINE
from qwen35rt.engine.sampler import Sampler, SamplingParams, make_workspace
from qwen35rt.errors import BackendError, GenerationFailed
from qwen35rt.plan import Markup

from ..fixtures import Float, write_tiny
from .rig import ANSWER, Rig, alone, best_of, fast_rig, prompts_of, random_ids

N_VOCAB = 300
Row = npt.NDArray[np.float32]


def params_of(rng: np.random.Generator, seed: int) -> SamplingParams:
    """Settings of all kinds, the usual ones more often than others."""
    biased = rng.choice(N_VOCAB, int(rng.choice([0, 3, 100])), replace=False).tolist()
    worst = float(rng.choice([0, 0, 0, 4]))
    biases = {i: False if rng.random() < 0.2 else float(rng.choice([-3.0, -0.5, 0.0, worst])) for i in biased}
    return SamplingParams(
        temperature=float(rng.choice([0, 0.7, 1.5])),
        top_k=int(rng.choice([-1, 0, 1, 5, 20, N_VOCAB])),
        top_p=float(rng.choice([0.5, 0.95, 1])),
        min_p=float(rng.choice([0, 0, 0.1])),
        presence_penalty=float(rng.choice([0, 0, 1.5, -0.5])),
        frequency_penalty=float(rng.choice([0, 0, 0.5, -0.5])),
        repetition_penalty=float(rng.choice([1, 1, 1.3, 0.8])),
        repeat_last_n=int(rng.choice([-1, 8])),
        seed=seed,
        logit_bias=biases,
        stop_token_ids=rng.integers(0, N_VOCAB, 3).tolist(),
        ignore_eos=bool(rng.random() < 0.5),
        min_tokens=int(rng.choice([0, 4])),
    )


def row_of(rng: np.random.Generator) -> Row:
    """Logits around 0, often with many ties, sometimes mostly -inf."""
    x = rng.normal(0, rng.choice([0.3, 3]), N_VOCAB)
    if rng.random() < 0.5:
        x = np.round(2 * x) / 2
    if rng.random() < 0.1:
        x[rng.permutation(N_VOCAB)[30:]] = -np.inf
    return x.astype(np.float32)


def test_where_the_best_are_enough_nothing_else_is_drawn() -> None:
    """Kept tokens, probabilities and the draw are equal to the bit. The sampler says so wherever nothing that it
    changes is among the best and those are more than it needs, and is right to doubt at times."""
    workspace, seen, differed = make_workspace(N_VOCAB), {True: 0, False: 0}, 0
    for seed in range(400):
        rng = np.random.default_rng([31, seed])
        params = params_of(rng, seed)
        params.validate(N_VOCAB)
        prompt, ends = rng.integers(0, N_VOCAB, 20).tolist(), rng.integers(0, N_VOCAB, 2).tolist()
        sampler = Sampler(params, N_VOCAB, (290, 299), ends, prompt=prompt, workspace=workspace)
        base = row_of(rng)
        for position in range(10):
            # What is drawn, and so changed, is among the best again; often there are just as many as needed.
            row = base + np.round(rng.normal(0, 0.5, N_VOCAB), 1).astype(np.float32)
            given = int(rng.choice([max(sampler.needs_best + int(rng.integers(7)), 1), 32, N_VOCAB - 1]))
            best = best_of(row, given)
            enough = sampler.enough(best)
            seen[enough] += 1
            ids, probs = sampler.distribution(row)
            if enough:
                some_ids, some_probs = sampler.distribution(best)
                np.testing.assert_array_equal(some_ids, ids)
                np.testing.assert_array_equal(some_probs, probs)
                assert sampler.sample(best, position) == sampler.sample(row, position)
            else:
                differed += not _equal(sampler, best, ids, probs)
            sampler.accept(sampler.sample(row, position).id)
    assert min(seen.values()) > 500
    assert differed > 100


def _equal(sampler: Sampler, best: Best, ids: npt.NDArray[np.int32], probs: npt.NDArray[np.float64]) -> bool:
    try:
        some_ids, some_probs = sampler.distribution(best)
    except GenerationFailed:
        return False
    return np.array_equal(some_ids, ids) and np.array_equal(some_probs, probs)


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({}, 40),
        ({"temperature": 0, "top_k": 0}, 1),
        ({"top_k": 0}, 0),
        ({"top_k": -1}, 0),
        ({"top_k": 20, "top_p": 0.9, "min_p": 0.1}, 20),
        ({"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}, 40),
        ({"presence_penalty": -0.1, "frequency_penalty": 1.0}, 0),
        ({"frequency_penalty": -0.1}, 0),
        ({"repetition_penalty": 0.9}, 0),
        ({"logit_bias": {3: -1.0, 4: False, 5: 0.0}}, 40),
        ({"logit_bias": {3: -1.0, 4: 0.1}}, 0),
        ({"logprobs": 0}, 0),
    ],
)
def test_how_many_of_the_best_a_draw_needs(fields: dict[str, Any], needs: int) -> None:
    assert Sampler(SamplingParams(**fields), N_VOCAB).needs_best == needs


def test_only_what_is_changed_among_the_best_counts() -> None:
    """Equality is enough; a changed token that is not there costs nothing."""
    row = np.arange(N_VOCAB, dtype=np.float32)
    best = best_of(row, 10)  # 290 to 299
    params = SamplingParams(top_k=6, presence_penalty=1.0, logit_bias={290: -1.0, 3: -1.0, 4: False}, ignore_eos=True)
    sampler = Sampler(params, N_VOCAB, (291, 5), eog=(292,))
    for token, enough in ((7, True), (299, True), (299, True), (294, False)):
        sampler.accept(token)
        assert sampler.enough(best) == enough
    late = Sampler(SamplingParams(top_k=8, min_tokens=2), N_VOCAB, eog=(292, 293, 294))
    late.accept(1)
    assert not late.enough(best)
    late.accept(1)
    assert late.enough(best)


def test_each_of_the_best_has_its_own_bias_and_count() -> None:
    """Whatever stands before it in the lists of what is changed and is not among the best."""
    row = np.linspace(0, 60, N_VOCAB, dtype=np.float32)
    params = SamplingParams(top_k=20, top_p=1, frequency_penalty=0.25, logit_bias={3: -5.0, 297: -0.5, 298: -1.0})
    sampler = Sampler(params, N_VOCAB)
    for token in (7, 7, 7, 7, 299, 296, 296):
        sampler.accept(token)
    best = best_of(row, 30)
    assert sampler.enough(best)
    for found, want in zip(sampler.distribution(best), sampler.distribution(row), strict=True):
        np.testing.assert_array_equal(found, want)


def test_a_row_of_few_finite_logits_is_all_there() -> None:
    row = np.full(N_VOCAB, -np.inf, np.float32)
    row[:5] = range(5)
    params = SamplingParams(top_k=20, logit_bias=dict.fromkeys(range(N_VOCAB), -1.0))
    assert Sampler(params, N_VOCAB).enough(best_of(row, 25))
    assert not Sampler(params, N_VOCAB).enough(best_of(row, 24))


# ------------------------------------------------------------------------------------------ a core

# Fields of a turn, what its steps ask for, draws that need a row in whole.
KINDS: dict[str, tuple[dict[str, Any], int, str]] = {
    "default": ({"temperature": 1.2, "top_k": 8}, 16, "none"),
    "greedy": ({"top_k": 0}, 16, "none"),
    "presence": ({"temperature": 1.2, "top_k": 8, "presence_penalty": 1.5, "min_p": 0.01}, 16, "none"),
    "biases": ({"temperature": 1.2, "top_k": 8, "logit_bias": dict.fromkeys(range(320), -0.5)}, 16, "all"),
    "bans": ({"top_k": 0, "logit_bias": {i: False for i in range(320) if i % 80 != 65}}, 16, "some"),
    "raising": ({"temperature": 1.2, "top_k": 8, "logit_bias": {17: 9.0}}, 0, "none"),
    "wide": ({"temperature": 1.2, "top_k": 9}, 0, "none"),
    "open": ({"temperature": 1.2, "top_k": 0}, 0, "none"),
    "logprobs": ({"temperature": 1.2, "top_k": 8, "logprobs": 2}, 0, "none"),
}


def best_rig(path: Path, top: int = 16, **options: Any) -> Rig:
    rig = fast_rig(path, **options)
    rig.spy.only_best, rig.core.top = True, top
    return rig


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_from_the_best_is_that_from_all(kind: str, tiny_dense: Path) -> None:
    """Slices of a prompt that draw nothing ask for the best alone, too; each draw asks for no more than it needs."""
    fields, top, whole = KINDS[kind]
    fields, prompts = {**ANSWER, "seed": 3, **fields}, prompts_of([100])
    rig = best_rig(tiny_dense)
    done = rig.run(prompts[0], **fields)
    assert done.ids == alone(tiny_dense, prompts, **fields)[0]
    assert rig.spy.tops == [16] + [top] * 6
    assert rig.spy.whole[0] == []
    assert len(rig.spy.whole) == 7
    counts = {"none": {0}, "some": set(range(1, 7)), "all": {6}}
    assert rig.spy.whole.count([0]) in counts[whole]


def test_b18_turns_of_all_kinds_at_once_answer_as_alone(tiny_dense: Path) -> None:
    """One that needs all logits has the step copy all; rows in whole are those of the turns that need them."""
    for kinds in ([kind for kind, (_, top, _) in KINDS.items() if top], list(KINDS)):
        fields: list[dict[str, Any]] = [{**ANSWER, "seed": 3, **KINDS[kind][0]} for kind in kinds]
        prompts = prompts_of([5 + i for i in range(len(kinds))])
        rig = best_rig(tiny_dense, parallel=len(kinds))
        turns = [rig.add(p, **f) for p, f in zip(prompts, fields, strict=True)]
        want = [alone(tiny_dense, [p], **f)[0] for p, f in zip(prompts, fields, strict=True)]
        assert [c.ids for c in rig.finish(*turns)] == want
        if kinds == list(KINDS):
            assert 0 in rig.spy.tops
        else:
            assert set(rig.spy.tops) == {16}
            assert {kinds[row] for rows in rig.spy.whole for row in rows} == {"biases", "bans"}


def test_the_default_is_the_number_of_the_configuration(tiny_dense: Path) -> None:
    rig = fast_rig(tiny_dense)
    rig.run([1, 2, 3], temperature=1.0, **ANSWER)
    assert set(rig.spy.tops) == {ENGINE.top_k_on_device}
    assert rig.spy.whole == [[]] * 6


def test_log_probabilities_of_a_prompt_need_all_logits_while_it_is_read(tiny_dense: Path) -> None:
    rig = best_rig(tiny_dense)
    ids = random_ids(100)
    done = rig.run(ids, prompt_logprobs=True, **ANSWER)
    want = fast_rig(tiny_dense).run(ids, prompt_logprobs=True, **ANSWER)
    assert done.prompt_logprobs == want.prompt_logprobs
    assert done.ids == want.ids == alone(tiny_dense, [ids])[0]
    assert rig.spy.tops == [0, 0] + [16] * 5


def test_forced_tokens_ask_for_no_row_in_whole(tiny_dense: Path) -> None:
    """The closing of a reasoning is written whatever the logits are, if they are finite."""
    markup = Markup(think=1, think_end=2, closing=(9, 8, 2), reasoning=True, budget=0)
    rig = best_rig(tiny_dense)
    done = rig.run([1, 2, 3], markup=markup, **{**ANSWER, "logit_bias": dict.fromkeys(range(320), -0.5)})
    assert done.ids[:3] == [9, 8, 2]
    assert rig.spy.whole == [[]] * 3 + [[0]] * 3


def test_b29_a_turn_that_meets_nan_fails_alone(tmp_path: Path) -> None:
    """In a row without it, and while the prompt is read."""

    def spoil(values: Float) -> Float:
        values[5] = np.nan
        return values

    path = write_tiny(tmp_path / "nan.gguf", overrides={"token_embd.weight": spoil}, tied=False)
    good = [[i for i in p if i != 5] for p in prompts_of([60, 90])]
    rig = best_rig(path)
    turns = [rig.add(p, **ANSWER) for p in (good[0], [5], good[1], [5, *good[0], *good[1]])]
    assert [c.ids for c in rig.finish(turns[0], turns[2])] == alone(path, good)
    for bad in (turns[1], turns[3]):
        with pytest.raises(GenerationFailed, match="not finite"):
            rig.result(bad)
    assert set(rig.spy.tops) == {16}
    rig.check_all_returned()


def test_a_device_that_fails_at_a_row_leaves_all_turns_as_they_were(tiny_dense: Path) -> None:
    """Not half a step: those before it in the batch have drawn nothing yet, and all go on elsewhere."""
    rig = best_rig(tiny_dense)
    fields = [{**ANSWER, "temperature": 1.0, "top_k": 8, "seed": 2}, {**ANSWER, **KINDS["biases"][0], "seed": 3}]
    prompts = prompts_of([9, 12])
    turns = [rig.add(p, **f) for p, f in zip(prompts, fields, strict=True)]
    for _ in range(2):
        rig.step()
    rig.spy.fail_whole = True
    with pytest.raises(BackendError, match="made to fail"):
        rig.step()
    assert [t.generated for t in turns] == [2, 2]
    other = best_rig(tiny_dense)
    other.events = rig.events
    for turn in turns:
        other.core.add(turn)
    assert [c.ids for c in other.finish(*turns)] == [
        alone(tiny_dense, [p], **f)[0] for p, f in zip(prompts, fields, strict=True)
    ]

"""Many turns on one core equal each turn alone: batches, kept states, lack of memory, cancels (B18, C25, C29)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35rt.backends.base import Backend, Batch
from qwen35rt.backends.reference import ReferenceBackend
from qwen35rt.config import ENGINE
from qwen35rt.engine.scheduler import share_rows
from qwen35rt.engine.sizes import pool_limits
from qwen35rt.engine.turn import Turn
from qwen35rt.errors import ConfigError, GenerationFailed, OutOfMemory
from qwen35rt.model.source import open_source

from ..fixtures import Float, write_tiny
from ..implementations import cpu_backend, isa_levels
from .rig import N_CTX, PAGE, Rig, random_ids, until

ANSWER: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    formats = {"*attn_*.weight": "Q8_0", "*ffn_*.weight": "Q4_0", "token_embd*": "Q8_0"}
    drop = {"*norm.weight": ""}  # vectors stay as they are
    return write_tiny(tmp_path_factory.mktemp("q") / "q.gguf", formats=drop | formats)


@cache
def best_backend() -> Backend:
    """One thread of the best level: much faster than the reference, and what serves in the end."""
    return cpu_backend(isa_levels()[-1], threads=1) if isa_levels() else ReferenceBackend()


def rig(path: Path, **options: Any) -> Rig:
    return Rig(path, **{"backend": best_backend(), "rows": 64, "parallel": 4, **options})


def alone(path: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Ids of the answer to each prompt, each from an empty state."""
    cold = rig(path, parallel=1, states=0, cache_bytes=0)
    return [cold.run(p, **{**ANSWER, **options}).ids for p in prompts]


def prompts_of(lengths: list[int], seed: int = 18) -> list[list[int]]:
    return [random_ids(n, seed + i) for i, n in enumerate(lengths)]


MIXED = [3, 300, 17, 64, 1, 129, 40, 250]


# ------------------------------------------------------------------------------------------ batches


def test_b18a_equal_prompts_at_once_have_one_answer(tiny_dense: Path) -> None:
    many = rig(tiny_dense)
    turns = [many.add(random_ids(70), **ANSWER) for _ in range(8)]
    assert {tuple(c.ids) for c in many.finish(*turns)} == {tuple(alone(tiny_dense, [random_ids(70)])[0])}
    many.check_all_returned()


@pytest.mark.parametrize("rows", [5, 7, 64, 512])
@pytest.mark.parametrize("model", ["tiny_dense", "quantised"])
def test_b18b_c25_different_prompts_at_once_answer_as_alone(
    model: str, rows: int, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(model)
    prompts = prompts_of(MIXED)
    many = rig(path, rows=rows, beside_decode=max(1, rows // 2))
    turns = [many.add(p, **ANSWER) for p in prompts]
    assert [c.ids for c in many.finish(*turns)] == alone(path, prompts)
    assert max(many.spy.steps) <= rows
    many.check_all_returned()


def test_b18_reference_backend_too(tiny_moe: Path) -> None:
    prompts = prompts_of([3, 40, 17, 33])
    many, one = Rig(tiny_moe, rows=16, parallel=4), Rig(tiny_moe, rows=16)
    turns = [many.add(p, **ANSWER) for p in prompts]
    assert [c.ids for c in many.finish(*turns)] == [one.run(p, cache=False, **ANSWER).ids for p in prompts]


def test_b18c_staggered(tiny_dense: Path) -> None:
    prompts = prompts_of(MIXED)
    many = rig(tiny_dense)
    turns = []
    for p in prompts:
        turns.append(many.add(p, temperature=1.0, seed=5, **ANSWER))
        many.step()
    assert [c.ids for c in many.finish(*turns)] == alone(tiny_dense, prompts, temperature=1.0, seed=5)


def test_c65_first_tokens_of_four_come_before_any_ends_and_a_fifth_waits(tiny_dense: Path) -> None:
    many = rig(tiny_dense)
    turns = [many.add(random_ids(20), **ANSWER) for _ in range(5)]
    until(lambda: any(t.finish_reason for t in turns), many.step)
    assert [t.begun for t in turns] == [True] * 4 + [False]
    assert all(t.generated > 0 for t in turns[:4])
    many.finish()
    assert turns[4].finish_reason == "length"


def test_c27_choices_of_one_seed_differ_and_the_first_is_the_plain_one(tiny_dense: Path) -> None:
    many = rig(tiny_dense)
    hot: dict[str, Any] = {"temperature": 1.5, "top_k": 0, "seed": 3, **ANSWER}
    turns = [many.add(random_ids(9), choice=i, **hot) for i in range(3)]
    answers = [c.ids for c in many.finish(*turns)]
    assert answers[0] == alone(tiny_dense, [random_ids(9)], **hot)[0]
    assert len({tuple(a) for a in answers}) == 3


def test_rows_are_shared_by_age_and_those_that_decode_always_get_theirs() -> None:
    assert share_rows([1, 1, 1], 8, 4) == [1, 1, 1]
    assert share_rows([10, 10], 8, 4) == [8, 0]
    assert share_rows([1, 10, 10], 8, 4) == [1, 4, 0]
    assert share_rows([2, 1, 3, 9], 8, 6) == [2, 1, 3, 1]
    assert share_rows([], 8, 4) == []
    assert share_rows([1, 1, 5], 3, 4) == [1, 1, 1]


def test_a_long_prompt_does_not_hold_up_others(tiny_dense: Path) -> None:
    many = rig(tiny_dense, beside_decode=8)
    first = many.add(random_ids(4), max_tokens=12, ignore_eos=True)
    many.step()
    many.spy.steps.clear()
    many.add(random_ids(200), **ANSWER)
    until(lambda: first.finish_reason is not None, many.step)
    assert many.spy.steps == [9] * 11


# ------------------------------------------------------------------------------------------ kept states


def test_b02_b04_prompts_that_differ_near_their_end(tiny_dense: Path) -> None:
    warm, ids = rig(tiny_dense), random_ids(200)
    changed = [*ids[:198], 1, 2]
    warm.run(ids, **ANSWER)
    done = warm.run(changed, **ANSWER)
    assert 128 <= done.usage.cached_tokens <= 198
    assert done.ids == alone(tiny_dense, [changed])[0]
    longer = [*ids, *random_ids(20, 9)]
    assert warm.run(longer, **ANSWER).usage.cached_tokens >= 192
    assert (warm.core.counters.restores, warm.core.counters.queries) == (2, 3)
    off = rig(tiny_dense, cache_bytes=0)
    for p in (ids, longer, changed):
        assert off.run(p, **ANSWER).usage.cached_tokens == 0
    assert (off.core.counters.restores, off.core.counters.cached_tokens, off.core.cache.entries) == (0, 0, 0)


def test_c29_positions_of_kept_states(tiny_dense: Path) -> None:
    one = rig(tiny_dense)
    ids = random_ids(300)
    one.run(ids, max_tokens=0, warm=True)
    assert sorted(e.position for e in one.core.cache._entries) == [272, 288, 300]
    one.core.cache.clear()
    one.run(ids, max_tokens=2, keep_at=(7, 50, 299))
    assert sorted(e.position for e in one.core.cache._entries) == [7, 50, 299, 301]
    assert one.spy.steps == [64] * 4 + [44] + [64] * 4 + [44, 1]  # saves add no steps
    assert one.run([*ids[:299], 7, 8], **ANSWER).usage.cached_tokens == 299


def test_b01_second_turn_computes_what_is_new_only(tiny_dense: Path) -> None:
    """Ten turns of a conversation; the answer is in the next prompt, as the template writes it."""
    warm = rig(tiny_dense, states=4, cache_bytes=None)
    prompt, last = random_ids(400), 0
    for turn in range(10):
        done = warm.run(prompt, keep_at=(100, last, len(prompt) - 3), **ANSWER)
        if turn:
            assert done.usage.cached_tokens >= last
            assert done.timings.prompt_n <= len(prompt) - last
        assert done.ids == alone(tiny_dense, [prompt])[0]
        last = len(prompt) - 3
        prompt = [*prompt[:last], *done.ids, *random_ids(6, 50 + turn)][: N_CTX - 10]


def test_edited_middle_resumes_at_the_last_snapshot_before_it(tiny_dense: Path) -> None:
    warm, ids = rig(tiny_dense), random_ids(300)
    marks = (60, 130, 210, 290)
    warm.run(ids, keep_at=marks, **ANSWER)
    for edited, best in ((250, 210), (209, 130), (131, 130), (129, 60), (20, 0)):
        changed = [*ids[:edited], (ids[edited] + 1) % 256, *ids[edited + 1 :]]
        done = warm.run(changed, **ANSWER)
        assert done.usage.cached_tokens == best
        assert done.ids == alone(tiny_dense, [changed])[0]


def test_shared_system_prompt(tiny_dense: Path) -> None:
    warm, head = rig(tiny_dense), random_ids(150)
    others = [[*head, *random_ids(40, 60 + i)] for i in range(5)]
    warm.run(others[0], keep_at=(150,), **ANSWER)
    turns = [warm.add(p, keep_at=(150,), **ANSWER) for p in others[1:]]
    results = warm.finish(*turns)
    assert [c.usage.cached_tokens for c in results] == [150] * 4
    assert [c.ids for c in results] == alone(tiny_dense, others[1:])
    warm.check_all_returned()


def test_b10_evicted_states_come_back_by_computing(tiny_dense: Path) -> None:
    small = rig(tiny_dense, states=2, parallel=1)
    ids = random_ids(100)
    want = alone(tiny_dense, [ids])[0]
    assert small.run(ids, **ANSWER).ids == want
    for i in range(4):
        small.run(random_ids(90, 70 + i), **ANSWER)
    assert small.core.cache.evictions > 0
    done = small.run(ids, **ANSWER)
    assert (done.ids, done.usage.cached_tokens) == (want, 0)


def test_b12_long_prompts(tmp_path: Path, tiny_dense: Path) -> None:
    ids = random_ids(N_CTX - 9)
    answers = {tuple(rig(tiny_dense, rows=rows).run(ids, max_tokens=8, ignore_eos=True).ids) for rows in (64, 100, 512)}
    assert len(answers) == 1
    assert len(answers.pop()) == 8


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", ["tiny_dense", "quantised"])
def test_c25_c29_warm_equals_cold_in_any_order(model: str, seed: int, request: pytest.FixtureRequest) -> None:
    """Prompts that share beginnings come, are cancelled and paused at random, with little memory and few states."""
    path: Path = request.getfixturevalue(model)
    rng = random.Random(seed)
    trunk = random_ids(220, 80)
    prompts = []
    for i in range(14):
        cut = rng.choice([0, 5, 64, 65, 128, 150, 200])
        prompts.append([*trunk[:cut], *random_ids(rng.randint(1, 60), 200 + i)])
    many = rig(
        path,
        rows=rng.choice([8, 33, 64]),
        states=rng.choice([1, 3, 8]),
        pages=(N_CTX // PAGE) + 1 + rng.choice([0, 20, 200]),
        beside_decode=rng.choice([1, 16, 64]),
    )
    many.core.cache.limit_bytes = rng.choice([3, 6]) * (many.spy.state_bytes + 10 * many.spy.page_bytes)
    options = {"temperature": rng.choice([0, 1.0]), "seed": seed, "logprobs": 2}
    turns: list[Turn] = []
    waiting = list(prompts)
    while waiting or not all(t.finish_reason for t in turns):
        if waiting and rng.random() < 0.4:
            p = waiting.pop()
            marks = tuple(sorted({rng.randint(1, len(p)) for _ in range(rng.randint(0, 3))}))
            turns.append(many.add(p, keep_at=marks, **options, **ANSWER))
        live = [t for t in turns if t.finish_reason is None]
        for t in live:
            t.paused = rng.random() < 0.2
        if live and rng.random() < 0.03:
            rng.choice(live).cancelled = True
        many.step()
    cold = rig(path, parallel=1, states=0, cache_bytes=0)
    for turn in turns:
        got, want = many.result(turn), cold.run(list(turn.plan.ids), **options, **ANSWER)
        n = len(got.ids)
        assert got.ids == want.ids[:n]
        assert got.finish_reason == "cancelled" or n == 6
        assert got.usage.cached_tokens + got.timings.prompt_n == len(turn.plan.ids) or got.finish_reason == "cancelled"
        for a, b in zip(got.logprobs or (), want.logprobs or (), strict=False):
            assert abs(a.logprob - b.logprob) < 1e-4
    many.check_all_returned()


# ------------------------------------------------------------------------------------------ lack of memory, cancels


def test_too_few_pages_preempt_the_youngest_and_change_nothing(tiny_dense: Path) -> None:
    prompts = prompts_of([100, 120, 90, 110])
    options: dict[str, Any] = {
        "temperature": 1.0,
        "seed": 9,
        "max_tokens": 60,
        "ignore_eos": True,
        "stop": ["\x00\x01"],
    }
    small = rig(tiny_dense, pages=N_CTX // PAGE + 1, states=2)
    turns = [small.add(p, prompt_logprobs=True, logprobs=1, **options) for p in prompts]
    results = small.finish(*turns)
    assert small.core.counters.preemptions > 0
    one = rig(tiny_dense, parallel=1)
    for p, got in zip(prompts, results, strict=True):
        want = one.run(p, prompt_logprobs=True, logprobs=1, **options)
        assert (got.ids, got.text, got.usage) == (want.ids, want.text, want.usage)
        assert got.timings.prompt_n == len(p)
        assert [e and e.id for e in got.prompt_logprobs or ()] == [e and e.id for e in want.prompt_logprobs or ()]
    small.check_all_returned()


def test_c21_a_turn_that_fits_nowhere_fails_alone(tiny_dense: Path) -> None:
    tiny = rig(tiny_dense, pages=8)
    good = tiny.add(random_ids(60), **ANSWER)
    bad = tiny.add(random_ids(200), **ANSWER)
    grows = tiny.add(random_ids(120), max_tokens=30, ignore_eos=True)
    after = tiny.add(random_ids(30), **ANSWER)
    assert [c.finish_reason for c in tiny.finish(good, after)] == ["length"] * 2
    for turn in (bad, grows):
        with pytest.raises(OutOfMemory):
            tiny.result(turn)
    tiny.check_all_returned()


@pytest.mark.parametrize("moment", range(9))
def test_c61_cancel_at_every_moment_leaves_nothing_taken(tiny_dense: Path, moment: int) -> None:
    many = rig(tiny_dense, parallel=2, rows=32, states=2)
    many.run(random_ids(100), **ANSWER)
    turns = [many.add([*random_ids(96), *random_ids(70, i)], **ANSWER) for i in range(4)]
    for _ in range(moment):
        many.step()
    for turn in turns[:3]:
        turn.cancelled = True
    steps = len(many.spy.steps)
    many.step()
    assert len(many.spy.steps) <= steps + 1
    assert all(t.finish_reason is not None for t in turns[:3])
    assert many.finish(turns[3])[0].ids == alone(tiny_dense, [list(turns[3].plan.ids)])[0]
    many.check_all_returned()


def test_c53_a_paused_turn_gives_its_place_to_those_that_wait(tiny_dense: Path) -> None:
    one = rig(tiny_dense, parallel=1)
    first = one.add(random_ids(50), **ANSWER)
    one.step()
    first.paused = True
    assert not one.step()
    assert len(one.core.running) == 1
    second = one.add(random_ids(30, 8), **ANSWER)
    one.finish(second)
    first.paused = False
    prompts = [random_ids(50), random_ids(30, 8)]
    assert [c.ids for c in one.finish(first, second)] == alone(tiny_dense, prompts)
    assert one.result(first).timings.prompt_n == 50
    one.check_all_returned()


def test_b29_a_turn_that_meets_nan_fails_alone(tmp_path: Path) -> None:
    def spoil(values: Float) -> Float:
        values[5] = np.nan
        return values

    many = rig(write_tiny(tmp_path / "nan.gguf", overrides={"token_embd.weight": spoil}, tied=False))
    good = [[i for i in p if i != 5] for p in prompts_of([60, 90, 40])]
    bad = [*good[0], 5, *good[1]]
    want = alone(tmp_path / "nan.gguf", good)
    turns = [many.add(p, **ANSWER) for p in (good[0], bad, good[1], good[2])]
    results = many.finish(turns[0], turns[2], turns[3])
    assert [c.ids for c in results] == want
    with pytest.raises(GenerationFailed, match="not finite"):
        many.result(turns[1])
    for entry in many.core.cache._entries:
        delta, conv = many.spy.read_slot(entry.slot)
        assert np.isfinite(delta).all()
        assert np.isfinite(conv).all()
    many.check_all_returned()


def test_b86_log_probabilities_of_the_prompt(tiny_dense: Path) -> None:
    ids = random_ids(50)
    many = rig(tiny_dense, rows=16, parallel=3)
    many.add(random_ids(30, 8), max_tokens=20, ignore_eos=True)
    many.step()
    done = many.finish(many.add(ids, prompt_logprobs=True, logprobs=2, max_tokens=0))[0]
    exe = best_backend().compile(open_source(tiny_dense).program, many.spy.limits)
    logits = np.concatenate(
        [exe.run(Batch.single([t], i, np.arange(8), 0))[0].astype(np.float64) for i, t in enumerate(ids)]
    )
    want = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert done.prompt_logprobs is not None
    assert done.prompt_logprobs[0] is None
    assert len(done.prompt_logprobs) == len(ids)
    for at, entry in enumerate(done.prompt_logprobs[1:], 1):
        assert entry is not None
        assert entry.id == ids[at]
        assert entry.logprob == pytest.approx(want[at - 1, ids[at]], abs=1e-4)
        assert [i for i, _ in entry.top] == np.argsort(-want[at - 1])[:2].tolist()
    assert (done.ids, done.finish_reason, done.usage.completion_tokens) == ([], "length", 0)


# ------------------------------------------------------------------------------------------ sizes


def test_sizes_hold_all_contexts_and_the_cache_where_memory_allows(tiny_dense: Path) -> None:
    program = open_source(tiny_dense).program
    state, page = program.state.state_bytes(), program.state.page_bytes(ENGINE.page_tokens, 2)
    whole = 1000 // 64 + 2
    plain = pool_limits(program, 1000, 512, 4, 0)
    assert (plain.slots, plain.pages, plain.rows, plain.out_rows) == (4, 4 * whole, 512, 64)
    cached = pool_limits(program, 1000, 512, 4, 3 * (state + page))
    assert (cached.slots, cached.pages) == (7, 4 * whole + (2 * state + 3 * page) // page)
    short = pool_limits(program, 1000, 512, 4, 0, memory_bytes=4 * state + 20 * page)
    assert short.pages == 20
    assert pool_limits(program, 1000, 512, 4, 1 << 30, memory_bytes=0).pages == whole
    assert pool_limits(program, 1000, 2, 4, 0).rows == 4
    assert pool_limits(program, 1000, 512, 1, 1 << 50).slots <= 1 + ENGINE.max_cache_states


@pytest.mark.parametrize("make", [ReferenceBackend, best_backend])
@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
def test_sizes_are_those_of_the_executable(tiny_dense: Path, make: Callable[[], Backend], kv_dtype: Any) -> None:
    program = open_source(tiny_dense).program
    exe = make().compile(program, pool_limits(program, 100, 8, 1, 0, kv_dtype))
    assert exe.state_bytes == program.state.state_bytes() == sum(a.nbytes for a in exe.read_slot(0))
    assert exe.page_bytes == program.state.page_bytes(64, exe.limits.value_bytes)
    exe.close()


def test_a_core_needs_a_slot_and_a_row_for_each_turn(tiny_dense: Path) -> None:
    with pytest.raises(ConfigError):
        Rig(tiny_dense, parallel=4, rows=3)

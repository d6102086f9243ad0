"""Many turns on one core equal each turn alone: batches, kept states, lack of memory, cancels (B18, C25, C29)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35rt.backends.base import Backend, Batch
from qwen35rt.backends.reference import ReferenceBackend
from qwen35rt.config import ENGINE
from qwen35rt.engine.result import Delta
from qwen35rt.engine.scheduler import share_rows
from qwen35rt.engine.sizes import pool_limits
from qwen35rt.errors import ConfigError, GenerationFailed, OutOfMemory
from qwen35rt.model.source import open_source

from ..fixtures import Float, write_tiny
from .rig import ANSWER, MIXED, N_CTX, PAGE, Rig, alone, best_backend, fast_rig, prompts_of, random_ids, until


def test_b18a_equal_prompts_at_once_have_one_answer(tiny_dense: Path) -> None:
    many = fast_rig(tiny_dense)
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
    many = fast_rig(path, rows=rows, beside_decode=max(1, rows // 2))
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
    many = fast_rig(tiny_dense)
    turns = []
    for p in prompts:
        turns.append(many.add(p, temperature=1.0, seed=5, **ANSWER))
        many.step()
    assert [c.ids for c in many.finish(*turns)] == alone(tiny_dense, prompts, temperature=1.0, seed=5)


def test_c65_first_tokens_of_four_come_before_any_ends_and_a_fifth_waits(tiny_dense: Path) -> None:
    many = fast_rig(tiny_dense)
    turns = [many.add(random_ids(20), **ANSWER) for _ in range(5)]
    until(lambda: any(t.finish_reason for t in turns), many.step)
    assert [t.begun for t in turns] == [True] * 4 + [False]
    assert all(t.generated > 0 for t in turns[:4])
    many.finish()
    assert turns[4].finish_reason == "length"


def test_c27_choices_of_one_seed_differ_and_the_first_is_the_plain_one(tiny_dense: Path) -> None:
    many = fast_rig(tiny_dense)
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
    many = fast_rig(tiny_dense, beside_decode=8)
    first = many.add(random_ids(4), max_tokens=12, ignore_eos=True)
    many.step()
    many.spy.steps.clear()
    many.add(random_ids(200), **ANSWER)
    until(lambda: first.finish_reason is not None, many.step)
    assert many.spy.steps == [9] * 11


def test_too_few_pages_preempt_the_youngest_and_change_nothing(tiny_dense: Path) -> None:
    prompts = prompts_of([100, 120, 90, 110])
    options: dict[str, Any] = {
        "temperature": 1.0,
        "seed": 9,
        "max_tokens": 60,
        "ignore_eos": True,
        "stop": ["\x00\x01"],
    }
    small = fast_rig(tiny_dense, pages=N_CTX // PAGE + 1, states=2)
    turns = [small.add(p, prompt_logprobs=True, logprobs=1, **options) for p in prompts]
    results = small.finish(*turns)
    assert small.core.counters.preemptions > 0
    one = fast_rig(tiny_dense, parallel=1)
    for p, got in zip(prompts, results, strict=True):
        want = one.run(p, prompt_logprobs=True, logprobs=1, **options)
        assert (got.ids, got.text, got.usage) == (want.ids, want.text, want.usage)
        assert got.timings.prompt_n == len(p)
        assert [e and e.id for e in got.prompt_logprobs or ()] == [e and e.id for e in want.prompt_logprobs or ()]
    for turn, got in zip(turns, results, strict=True):
        deltas = [e for e in small.events[turn] if isinstance(e, Delta)]
        assert deltas[0].prompt_logprobs == tuple(got.prompt_logprobs or ())  # as soon as the prompt is computed
        assert {d.prompt_logprobs for d in deltas[1:]} == {None}
    small.check_all_returned()


def test_a_turn_waits_where_it_would_soon_take_the_memory_of_those_that_run(tiny_dense: Path) -> None:
    tight = fast_rig(tiny_dense, pages=8)
    first, second = tight.add(random_ids(60), **ANSWER), tight.add(random_ids(64), **ANSWER)
    tight.step()
    assert (first.begun, second.begun) == (True, False)  # the last page is for the first one's answer
    tight.finish(first, second)
    assert tight.core.counters.preemptions == 0


def test_c21_a_turn_that_fits_nowhere_fails_alone(tiny_dense: Path) -> None:
    tiny = fast_rig(tiny_dense, pages=8)
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
    many = fast_rig(tiny_dense, parallel=2, rows=32, states=2)
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
    one = fast_rig(tiny_dense, parallel=1)
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
    assert one.core.counters.queries == 2  # each once, however often it came and went
    one.check_all_returned()


def test_b29_a_turn_that_meets_nan_fails_alone(tmp_path: Path) -> None:
    def spoil(values: Float) -> Float:
        values[5] = np.nan
        return values

    many = fast_rig(write_tiny(tmp_path / "nan.gguf", overrides={"token_embd.weight": spoil}, tied=False))
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
    many = fast_rig(tiny_dense, rows=16, parallel=3)
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


def test_what_steps_did_is_counted(tiny_dense: Path) -> None:
    many = fast_rig(tiny_dense, parallel=2, rows=16)
    many.finish(*(many.add(random_ids(n), max_tokens=3, ignore_eos=True, cache=False) for n in (20, 5)))
    counters = many.core.counters
    # 16 rows of the first; its last 4 and the second's; then both decode.
    assert (many.spy.steps, counters.step_rows) == ([16, 9, 2, 2], {16: 1, 9: 1, 2: 2})
    assert (counters.steps, counters.rows, counters.turn_steps, counters.longest) == (4, 29, 7, 22)
    assert many.core.state_bytes == 0
    many.add(random_ids(40), **ANSWER)
    many.step()
    assert many.core.cache.entries == 1
    assert many.core.state_bytes == 2 * many.spy.state_bytes


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

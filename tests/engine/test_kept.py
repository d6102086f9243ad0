"""Kept states: where they are made, that they are found, and that answers are those of a cold run (B01 to B12, C29)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import qwen35rt
from qwen35rt.engine.turn import Turn

from ..fixtures import write_tiny
from ..implementations import native
from .rig import ANSWER, N_CTX, PAGE, alone, fast_rig, random_ids


def test_b02_b04_prompts_that_differ_near_their_end(tiny_dense: Path) -> None:
    warm, ids = fast_rig(tiny_dense), random_ids(200)
    changed = [*ids[:198], 1, 2]
    warm.run(ids, **ANSWER)
    done = warm.run(changed, **ANSWER)
    assert 128 <= done.usage.cached_tokens <= 198
    assert done.ids == alone(tiny_dense, [changed])[0]
    longer = [*ids, *random_ids(20, 9)]
    assert warm.run(longer, **ANSWER).usage.cached_tokens >= 192
    assert (warm.core.counters.restores, warm.core.counters.queries) == (2, 3)
    off = fast_rig(tiny_dense, cache_bytes=0)
    for p in (ids, longer, changed):
        assert off.run(p, **ANSWER).usage.cached_tokens == 0
    assert (off.core.counters.restores, off.core.counters.cached_tokens, off.core.cache.entries) == (0, 0, 0)


def test_c29_positions_of_kept_states(tiny_dense: Path) -> None:
    one = fast_rig(tiny_dense)
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
    warm = fast_rig(tiny_dense, states=4, cache_bytes=None)
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
    warm, ids = fast_rig(tiny_dense), random_ids(300)
    marks = (60, 130, 210, 290)
    warm.run(ids, keep_at=marks, **ANSWER)
    for edited, best in ((250, 210), (209, 130), (131, 130), (129, 60), (20, 0)):
        changed = [*ids[:edited], (ids[edited] + 1) % 256, *ids[edited + 1 :]]
        done = warm.run(changed, **ANSWER)
        assert done.usage.cached_tokens == best
        assert done.ids == alone(tiny_dense, [changed])[0]


def test_shared_system_prompt(tiny_dense: Path) -> None:
    warm, head = fast_rig(tiny_dense), random_ids(150)
    others = [[*head, *random_ids(40, 60 + i)] for i in range(5)]
    warm.run(others[0], keep_at=(150,), **ANSWER)
    turns = [warm.add(p, keep_at=(150,), **ANSWER) for p in others[1:]]
    results = warm.finish(*turns)
    assert [c.usage.cached_tokens for c in results] == [150] * 4
    assert [c.ids for c in results] == alone(tiny_dense, others[1:])
    warm.check_all_returned()


def test_b10_evicted_states_come_back_by_computing(tiny_dense: Path) -> None:
    small = fast_rig(tiny_dense, states=2, parallel=1)
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
    answers = {
        tuple(fast_rig(tiny_dense, rows=rows).run(ids, max_tokens=8, ignore_eos=True).ids) for rows in (64, 100, 512)
    }
    assert len(answers) == 1
    assert len(answers.pop()) == 8


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(native() is None, reason="the compiled module qwen35rt._native is not built")
def test_b12_20000_tokens(tmp_path: Path) -> None:
    """The same 8 tokens with any rows of a step and any context."""
    path = write_tiny(tmp_path / "long.gguf", metadata={"qwen35.context_length": 65_536})
    prompt, answers = random_ids(20_000), set()
    for n_batch, n_ctx in ((64, 32_768), (512, 32_768), (2048, 32_768), (512, 24_576), (512, 65_536)):
        with qwen35rt.load(path, device="cpu", n_batch=n_batch, n_ctx=n_ctx) as model:
            done = model.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True)
        assert (len(done.ids), done.finish_reason, done.usage.prompt_tokens) == (8, "length", 20_000)
        answers.add(tuple(done.ids))
        print(f"{n_batch} rows a step, context {n_ctx}: prompt in {done.timings.prompt_ms or 0:.0f} ms")
    assert len(answers) == 1


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
    many = fast_rig(
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
    cold = fast_rig(path, parallel=1, states=0, cache_bytes=0)
    for turn in turns:
        got, want = many.result(turn), cold.run(list(turn.plan.ids), **options, **ANSWER)
        n = len(got.ids)
        assert got.ids == want.ids[:n]
        assert got.finish_reason == "cancelled" or n == 6
        assert got.usage.cached_tokens + got.timings.prompt_n == len(turn.plan.ids) or got.finish_reason == "cancelled"
        for a, b in zip(got.logprobs or (), want.logprobs or (), strict=False):
            assert abs(a.logprob - b.logprob) < 1e-4
    many.check_all_returned()

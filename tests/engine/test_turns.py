"""One turn at a time on a core: budget, ends, texts, reuse of state, cancelling, what is measured, faults (B29)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35rt.engine.result import Delta
from qwen35rt.errors import BackendError, ContextLengthExceeded, GenerationFailed, RequestError
from qwen35rt.plan import Markup

from ..fixtures import Float, TinySpec, tiny_tensors, write_script, write_tiny
from ..gguf_raw import quantize
from .rig import N_CTX, Rig, random_ids, until


@pytest.fixture
def script(tmp_path: Path) -> Any:
    def make(*chain: bytes | str, **options: Any) -> Rig:
        return Rig(write_script(tmp_path / "script.gguf", list(chain), **options))

    return make


@pytest.fixture
def tiny(tiny_dense: Path) -> Rig:
    return Rig(tiny_dense)


def test_c30_c34_end_of_turn_token_is_no_text_and_not_counted(script: Any) -> None:
    done = script(b"one ", b"two").run("x", max_tokens=3)
    assert (done.text, done.finish_reason, done.stop_reason) == ("one two", "stop", None)
    assert (done.usage.completion_tokens, done.timings.predicted_n, len(done.ids)) == (2, 3, 2)


def test_c34_stop_string_on_the_last_token_of_the_budget(script: Any) -> None:
    rig = script(b"one ", b"two", b"three")
    assert rig.run("x", max_tokens=2, stop="wo").finish_reason == "stop"
    assert rig.run("x", max_tokens=2).finish_reason == "length"


def test_c30_stop_token_id_is_reported(script: Any) -> None:
    rig = script(b"one ", b"two", b"three")
    second = rig.run("x", max_tokens=2).ids[1]
    done = rig.run("x", stop_token_ids=[second])
    assert (done.text, done.stop_reason, done.usage.completion_tokens) == ("one ", second, 1)


def test_c30_ignore_eos_bans_the_end(script: Any) -> None:
    done = script(b"one ", b"two").run("x", max_tokens=6, ignore_eos=True)
    assert (done.finish_reason, done.usage.completion_tokens) == ("length", 6)


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [("CDE", "AB", "CDE"), ("CDX", "ABCDEFG", None), (["EF", "DE"], "ABC", "DE"), (None, "ABCDEFG", None)],
)
def test_b77_c31_c35_stop_strings_over_tokens(script: Any, stop: Any, text: str, reason: str | None) -> None:
    rig = script(b"A", b"BC", b"DEF", b"G")
    turn = rig.add("x", stop=stop)
    done = rig.finish(turn)[0]
    shown = ""
    for part in rig.texts(turn):
        shown += part
        assert text.startswith(shown)
    assert (done.text, done.stop_reason, done.finish_reason) == (text, reason, "stop")
    # C32: no step runs after the token that completes the stop (one prompt step, then one per earlier token).
    if reason is not None:
        assert len(rig.spy.steps) == done.usage.completion_tokens == 3


def test_c33_include_stop(script: Any) -> None:
    assert script(b"A", b"BC", b"DEF").run("x", stop="CD", include_stop=True).text == "ABCD"


def test_b53_characters_split_over_tokens(script: Any) -> None:
    rig = script(b"\xf0", b"\x9f", b"\x98", b"\x80", b"\xe3", b"\x81", b"x", b"end")
    turn = rig.add("x")
    done = rig.finish(turn)[0]
    deltas = rig.texts(turn)
    assert "".join(deltas) == done.text == "😀\ufffdxend"
    assert deltas[3] == "😀"
    assert not any("\ufffd" in d for d in deltas[:6])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_b54_answer_that_ends_inside_a_character(script: Any, n: int) -> None:
    done = script(b"\xf0", b"\x9f", b"\x98", b"\x80").run("x", max_tokens=n)
    assert (done.text, done.finish_reason, done.usage.completion_tokens) == ("\ufffd", "length", n)


def test_c37_control_tokens_are_left_out_unless_asked_for(script: Any) -> None:
    rig = script(b"a", "<|box_start|>", "<think>", b"b")
    assert rig.run("x").text == "a<think>b"
    assert rig.run("x", skip_special=False).text == "a<|box_start|><think>b"


def test_c22_no_tokens_asked_for_means_no_step(tiny: Rig) -> None:
    done = tiny.run("hello", max_tokens=0)
    assert (done.text, done.finish_reason, done.usage.completion_tokens, done.on_gpu) == ("", "length", 0, False)
    assert tiny.spy.steps == []
    warm = tiny.run("hello", max_tokens=0, warm=True)
    assert (warm.text, warm.finish_reason, warm.usage.completion_tokens) == ("", "length", 0)
    assert tiny.run("hello!", max_tokens=1).usage.cached_tokens == 1
    times = done.timings.as_dict()
    assert [times[n] for n in ("prompt_ms", "predicted_ms", "ttft_ms", "predicted_per_second")] == [None] * 4


def test_b83_c18_c20_prompts_around_the_context(tiny: Rig) -> None:
    last = tiny.run(random_ids(N_CTX - 1), max_tokens=50, ignore_eos=True)
    assert (last.finish_reason, last.usage.completion_tokens) == ("length", 1)
    steps = len(tiny.spy.steps)
    for n in (N_CTX, 1000):
        with pytest.raises(ContextLengthExceeded, match=rf"{n} tokens .*{N_CTX}.*refused whole") as caught:
            tiny.run(random_ids(n))
        assert (caught.value.n_prompt_tokens, caught.value.n_ctx) == (n, N_CTX)
    assert len(tiny.spy.steps) == steps
    assert tiny.run(random_ids(N_CTX - 5), max_tokens=-1, ignore_eos=True).usage.completion_tokens == 5


@pytest.mark.parametrize("bad", [-1, 320, True, 1.0, "a"])
def test_b84_ids_outside_the_vocabulary(tiny: Rig, bad: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt\[1\]"):
        tiny.run([5, bad])
    with pytest.raises(RequestError, match="empty"):
        tiny.run([])


def test_c42_on_gpu_is_measured_from_every_step(tiny: Rig) -> None:
    assert tiny.run("hello", max_tokens=3).on_gpu is False
    tiny.spy.devices = iter(["cuda"] * 3)
    assert tiny.run("hello", max_tokens=3, ignore_eos=True).on_gpu is True
    for at in range(3):
        tiny.spy.devices = iter(["cpu" if i == at else "cuda" for i in range(3)])
        assert tiny.run("hello", max_tokens=3, ignore_eos=True).on_gpu is False


def test_c43_c44_timings(tiny: Rig) -> None:
    done = tiny.run(random_ids(40), max_tokens=4, ignore_eos=True)
    t = done.timings
    assert list(t.as_dict()) == [
        "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n", "predicted_ms",
        "predicted_per_token_ms", "predicted_per_second", "queue_ms", "ttft_ms",
    ]  # fmt: skip
    assert (t.cache_n, t.prompt_n, t.predicted_n) == (0, 40, 4)
    assert t.prompt_ms is not None
    assert t.predicted_ms is not None
    assert t.queue_ms is not None
    assert t.ttft_ms == pytest.approx(t.queue_ms + t.prompt_ms)
    assert t.predicted_per_second == pytest.approx(1e3 * 3 / t.predicted_ms)
    assert t.prompt_per_second == pytest.approx(1e3 * 40 / t.prompt_ms)
    assert tiny.run("x", max_tokens=1, ignore_eos=True).timings.predicted_ms is None


@pytest.mark.parametrize("asked", [True, False])
def test_c46_parts_have_timings_where_they_are_asked_for(tiny: Rig, asked: bool) -> None:
    turn = tiny.add("x", max_tokens=3, ignore_eos=True, timings=asked)
    tiny.finish(turn)
    told = [e.timings for e in tiny.events[turn] if isinstance(e, Delta)]
    assert [t and t.predicted_n for t in told] == ([1, 2, 3] if asked else [None] * 3)


def test_c25_prefill_slices_do_not_change_the_answer(tiny_dense: Path) -> None:
    ids = random_ids(50)
    answers = [Rig(tiny_dense, rows=rows).run(ids, max_tokens=8, ignore_eos=True).ids for rows in (1, 7, 64)]
    assert answers[0] == answers[1] == answers[2]


def test_c29_a_prompt_that_extends_an_answer_goes_on_from_its_end(tiny: Rig, tiny_dense: Path) -> None:
    ids = random_ids(40)
    first = tiny.run(ids, max_tokens=5, ignore_eos=True)
    longer = [*ids, *first.ids, *random_ids(6, seed=8)]
    tiny.spy.steps.clear()
    again = tiny.run(longer, max_tokens=5, ignore_eos=True)
    # The last drawn token of the first answer was never processed.
    assert again.usage.cached_tokens == again.timings.cache_n == 44
    assert again.timings.prompt_n == 7
    assert tiny.spy.steps == [7, 1, 1, 1, 1]
    assert again.ids == Rig(tiny_dense).run(longer, max_tokens=5, ignore_eos=True).ids


def test_c29_without_cache_prompt_nothing_is_looked_up_or_stored(tiny: Rig) -> None:
    ids = random_ids(40)
    tiny.run(ids, cache=False, max_tokens=5)
    assert (tiny.core.cache.entries, tiny.core.counters.queries) == (0, 0)
    tiny.run(ids, max_tokens=5)
    entries = tiny.core.cache.entries
    assert tiny.run(ids, cache=False, max_tokens=5).usage.cached_tokens == 0
    assert (tiny.core.cache.entries, tiny.core.counters.queries) == (entries, 1)


def test_cancel_between_prefill_slices_and_at_each_token(tiny: Rig, tiny_dense: Path) -> None:
    ids = random_ids(60)
    turn = tiny.add(ids, ignore_eos=True)
    until(lambda: len(tiny.spy.steps) == 2, tiny.step)
    turn.cancelled = True
    done = tiny.finish(turn)[0]
    assert (tiny.spy.steps, done.finish_reason, done.text, done.timings.prompt_n) == ([16, 16], "cancelled", "", 32)
    tiny.spy.steps.clear()
    turn = tiny.add(ids, ignore_eos=True)
    until(lambda: len(tiny.spy.steps) == 4, tiny.step)
    turn.cancelled = True
    done = tiny.finish(turn)[0]
    # 28 tokens were left of the prompt: two steps; then two tokens more.
    assert (tiny.spy.steps, done.finish_reason, done.usage.cached_tokens) == ([16, 12, 1, 1], "cancelled", 32)
    assert done.ids == Rig(tiny_dense).run(ids, max_tokens=3, ignore_eos=True).ids
    tiny.check_all_returned()


def test_a_failed_step_is_raised_and_turns_may_go_on_elsewhere(tiny: Rig, tiny_dense: Path) -> None:
    turn = tiny.add(random_ids(40), max_tokens=9, ignore_eos=True)
    tiny.spy.fail_at = 5
    with pytest.raises(BackendError, match="made to fail"):
        tiny.finish()
    other = Rig(tiny_dense)
    other.events = tiny.events
    other.core.add(turn)
    assert other.finish(turn)[0].ids == Rig(tiny_dense).run(random_ids(40), max_tokens=9, ignore_eos=True).ids
    assert other.result(turn).usage.prompt_tokens == other.result(turn).timings.prompt_n == 40


def test_c26_seeds(tiny: Rig) -> None:
    hot = {"temperature": 1.5, "top_k": 0, "max_tokens": 12, "ignore_eos": True}
    first, second = tiny.run("hello", **hot), tiny.run("hello", **hot)
    assert first.seed != second.seed
    assert first.ids != second.ids
    assert tiny.run("hello", seed=first.seed, **hot).ids == first.ids


def test_c56_logprobs_have_an_entry_per_drawn_token(script: Any) -> None:
    done = script(b"one ", b"two").run("x", logprobs=2)
    assert done.logprobs is not None
    assert len(done.logprobs) == done.timings.predicted_n == 3
    assert [e.id for e in done.logprobs[:2]] == done.ids
    for entry in done.logprobs:
        assert entry.top[0] == (entry.id, entry.logprob)
        assert len(entry.top) == 2


def test_b29_inf_in_a_weight_ends_the_turn_with_an_error(tmp_path: Path, tiny_dense: Path) -> None:
    def spoil(values: Float) -> Float:
        values[3, 5] = np.inf
        return values

    rig = Rig(write_tiny(tmp_path / "inf.gguf", overrides={"blk.3.ffn_down.weight": spoil}))
    with np.errstate(all="ignore"), pytest.raises(GenerationFailed, match=r"not finite.* state dropped"):
        rig.run("hello", max_tokens=50)
    assert rig.core.cache.entries == 0
    rig.check_all_returned()
    assert Rig(tiny_dense).run("hello", max_tokens=4, ignore_eos=True).usage.completion_tokens == 4


def test_b29_nan_in_a_quant_scale(tmp_path: Path) -> None:
    blocks = quantize(tiny_tensors(TinySpec())["blk.3.ffn_down.weight"], "Q8_0", np.random.default_rng(1)).copy()
    blocks[0, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    rig = Rig(write_tiny(tmp_path / "nan.gguf", extra={"blk.3.ffn_down.weight": (blocks, "Q8_0")}))
    with np.errstate(all="ignore"), pytest.raises(GenerationFailed):
        rig.run("hello", max_tokens=50)


def test_b29_the_next_turn_is_sound(tmp_path: Path) -> None:
    def spoil(values: Float) -> Float:
        values[ord("z") - 33] = np.nan  # bytes lie in the order of their letters, '!' first
        return values

    rig = Rig(write_tiny(tmp_path / "nan.gguf", overrides={"token_embd.weight": spoil}, tied=False))
    good = rig.run("hello", max_tokens=6, ignore_eos=True)
    with np.errstate(all="ignore"), pytest.raises(GenerationFailed):
        rig.run("hello z", max_tokens=6)
    again = rig.run("hello", max_tokens=6, ignore_eos=True)
    assert (again.ids, again.usage.cached_tokens) == (good.ids, 0)


def test_b29_nan_in_the_state_is_seen_before_the_end_of_the_prompt(tmp_path: Path) -> None:
    """A prompt that is cancelled half way leaves no state behind that no logits vouch for."""

    def spoil(values: Float) -> Float:
        values[5] = np.nan
        return values

    rig = Rig(write_tiny(tmp_path / "nan.gguf", overrides={"token_embd.weight": spoil}, tied=False))
    ids = [*range(6, 36), 5, *range(6, 60)]
    with np.errstate(all="ignore"), pytest.raises(GenerationFailed):
        rig.run(ids, keep_at=(16, 31, 33))
    assert rig.spy.steps == [16, 16]
    assert [e.position for e in rig.core.cache._entries] == [16]
    rig.check_all_returned()


def marked(rig: Rig, **options: Any) -> Markup:
    named = {"think": "<think>", "think_end": "</think>", "call": "<tool_call>", "call_end": "</tool_call>"}
    ids = {name: rig.tokenizer.encode(text, special=True)[0] for name, text in named.items()}
    return Markup(**{**ids, **options})


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_budget_of_reasoning_forces_its_end(script: Any, budget: int) -> None:
    rig = script(b"a", b"b", b"c", b"d", b"e", b"f", end=None)
    closing = (*rig.tokenizer.encode("!"), *rig.tokenizer.encode("</think>", special=True), *rig.tokenizer.encode("\n"))
    done = rig.run("x", max_tokens=budget + 6, markup=marked(rig, reasoning=True, budget=budget, closing=closing))
    assert done.text == "abc"[:budget] + "!</think>\n" + "abc"
    assert done.usage.reasoning_tokens == budget + 2
    assert done.usage.completion_tokens == budget + 6
    logged = rig.run("x", logprobs=1, max_tokens=9, markup=marked(rig, reasoning=True, budget=1, closing=closing))
    assert [e.id for e in logged.logprobs or ()] == logged.ids


def test_reasoning_that_the_answer_opens_is_counted_and_bounded(script: Any) -> None:
    rig = script("<think>", b"a", b"b", "</think>", b"c", end=None)
    done = rig.run("x", max_tokens=5, markup=marked(rig))
    assert (done.text, done.usage.reasoning_tokens) == ("<think>ab</think>c", 4)
    closing = tuple(rig.tokenizer.encode("</think>", special=True))
    done = rig.run("x", max_tokens=4, markup=marked(rig, budget=0, closing=closing))
    assert (done.text[:16], done.usage.reasoning_tokens) == ("<think></think>c", 2)


def test_b77_stops_act_outside_reasoning_and_calls_only(script: Any) -> None:
    rig = script(b"a#", "</think>", b"b", "<tool_call>", b"c#", "</tool_call>", b"d", b"e#f", b"g")
    done = rig.run("x", stop=["#", "think", "tool"], markup=marked(rig, reasoning=True))
    assert (done.text, done.stop_reason) == ("a#</think>b<tool_call>c#</tool_call>de", "#")
    assert rig.run("x", stop="#").text == "a"
    one = rig.run("x", markup=marked(rig, reasoning=True, one_call=True))
    assert (one.text, one.finish_reason) == ("a#</think>b<tool_call>c#</tool_call>", "stop")


def test_banned_ids_are_never_drawn(script: Any) -> None:
    rig = script(b"one ", b"two")
    second = rig.run("x").ids[1]
    assert second not in rig.run("x", banned=frozenset([second]), max_tokens=8, ignore_eos=True).ids

"""Turns on one sequence: budget, ends, reuse of state, cancelling, what is measured, and faults (B29)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35rt.backends.base import Batch, Executable, Float, Limits, StepReport
from qwen35rt.backends.reference import ReferenceBackend
from qwen35rt.engine.result import Completion
from qwen35rt.engine.session import Session, Turn
from qwen35rt.errors import BackendError, ContextLengthExceeded, GenerationFailed, RequestError
from qwen35rt.model.source import Source, open_source
from qwen35rt.plan import Plan, make_plan, sampling_params
from qwen35rt.tokenizer import Tokenizer, build_tokenizer

from ..fixtures import TinySpec, tiny_tensors, write_script, write_tiny
from ..gguf_raw import quantize

N_CTX = 256


class Spy:
    """An executable that notes the rows of each step and can lie about its device or fail."""

    def __init__(self, inner: Executable) -> None:
        self.inner, self.limits = inner, inner.limits
        self.state_bytes, self.page_bytes = inner.state_bytes, inner.page_bytes
        self.steps: list[int] = []
        self.devices: Iterator[str] | None = None
        self.fail_at = -1

    def run(self, batch: Batch, keep: Sequence[str] = ()) -> tuple[Float, StepReport]:
        if len(self.steps) == self.fail_at:
            self.fail_at = -1
            raise BackendError("made to fail")
        self.steps.append(len(batch.tokens))
        logits, report = self.inner.run(batch, keep)
        if self.devices is not None:
            report = replace(report, devices={next(self.devices): 1})
        return logits, report

    def copy_slot(self, source: int, target: int) -> None:
        self.inner.copy_slot(source, target)

    def read_slot(self, slot: int) -> tuple[Float, Float]:
        return self.inner.read_slot(slot)

    def write_slot(self, slot: int, delta: Float, conv: Float) -> None:
        self.inner.write_slot(slot, delta, conv)

    def copy_page(self, source: int, target: int) -> None:
        self.inner.copy_page(source, target)

    def close(self) -> None:
        self.inner.close()


class Rig:
    """A session on the reference backend, and shortcuts."""

    def __init__(self, path: Path, rows: int = 16, slots: int = 2) -> None:
        self.source: Source = open_source(path)
        self.tokenizer: Tokenizer = build_tokenizer(self.source.file.metadata)
        limits = Limits(rows=rows, out_rows=rows, slots=slots, pages=N_CTX // 16, page_tokens=16)
        self.spy = Spy(ReferenceBackend().compile(self.source.program, limits))
        self.session = Session(self.spy, self.tokenizer)

    def plan(self, prompt: str | Sequence[int], keep_at: int = 0, **options: Any) -> Plan:
        ids = self.tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else list(prompt)
        own = {n: options.pop(n) for n in ("max_tokens", "include_stop", "skip_special", "cache") if n in options}
        params = sampling_params({"temperature": 0, **options}, {}, self.tokenizer.n_vocab)
        return make_plan(ids, params, N_CTX, self.tokenizer.n_vocab, keep_at=keep_at, **own)

    def run(self, prompt: str | Sequence[int], **options: Any) -> Completion:
        return drain(self.session.turn(self.plan(prompt, **options)))


def drain(turn: Turn) -> Completion:
    texts = [delta.text for delta in turn]
    assert "".join(texts) == turn.completion.text
    return turn.completion


@pytest.fixture
def script(tmp_path: Path) -> Any:
    def make(*chain: bytes | str, **options: Any) -> Rig:
        return Rig(write_script(tmp_path / "script.gguf", list(chain), **options))

    return make


@pytest.fixture
def tiny(tiny_dense: Path) -> Rig:
    return Rig(tiny_dense)


def random_ids(n: int, seed: int = 7) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 256, n)]


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
    turn = rig.session.turn(rig.plan("x", stop=stop))
    shown = ""
    for delta in turn:
        shown += delta.text
        assert text.startswith(shown)
    done = turn.completion
    assert (done.text, done.stop_reason, done.finish_reason) == (text, reason, "stop")
    # C32: no step runs after the token that completes the stop (one prompt step, then one per earlier token).
    if reason is not None:
        assert len(rig.spy.steps) == done.usage.completion_tokens == 3


def test_c33_include_stop(script: Any) -> None:
    assert script(b"A", b"BC", b"DEF").run("x", stop="CD", include_stop=True).text == "ABCD"


def test_b53_characters_split_over_tokens(script: Any) -> None:
    rig = script(b"\xf0", b"\x9f", b"\x98", b"\x80", b"\xe3", b"\x81", b"x", b"end")
    turn = rig.session.turn(rig.plan("x"))
    deltas = [delta.text for delta in turn]
    assert "".join(deltas) == turn.completion.text == "😀\ufffdxend"
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


def test_c25_prefill_slices_do_not_change_the_answer(tiny_dense: Path) -> None:
    ids = random_ids(50)
    answers = [Rig(tiny_dense, rows=rows).run(ids, max_tokens=8, ignore_eos=True).ids for rows in (1, 7, 64)]
    assert answers[0] == answers[1] == answers[2]


def test_c29_a_prompt_that_extends_the_state_goes_on_from_it(tiny: Rig, tiny_dense: Path) -> None:
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


def test_c29_other_prompts_start_from_nothing(tiny: Rig, tiny_dense: Path) -> None:
    ids = random_ids(40)
    tiny.run(ids, max_tokens=5, ignore_eos=True)
    changed = [*ids[:38], 1, 2]
    done = tiny.run(changed, max_tokens=5, ignore_eos=True)
    assert done.usage.cached_tokens == 0
    assert done.ids == Rig(tiny_dense).run(changed, max_tokens=5, ignore_eos=True).ids
    assert tiny.run([*changed, *done.ids], cache=False, max_tokens=1).usage.cached_tokens == 0


def test_c29_an_equal_prompt_runs_again_where_no_state_lies_before_its_end(tiny: Rig) -> None:
    ids = random_ids(40)
    first = tiny.run(ids, max_tokens=1, ignore_eos=True)  # the state now holds exactly the prompt
    again = tiny.run(ids, max_tokens=1, ignore_eos=True)
    assert (again.ids, again.usage.cached_tokens) == (first.ids, 0)


def test_c29_kept_state_serves_prompts_that_share_the_beginning(tiny: Rig, tiny_dense: Path) -> None:
    ids = random_ids(40)
    first = tiny.run(ids, keep_at=30, max_tokens=5, ignore_eos=True)
    again = tiny.run(ids, keep_at=30, max_tokens=5, ignore_eos=True)
    assert (again.usage.cached_tokens, again.ids) == (30, first.ids)
    other = [*ids[:30], *random_ids(20, seed=9)]
    done = tiny.run(other, max_tokens=5, ignore_eos=True)
    assert done.usage.cached_tokens == 30
    assert done.ids == Rig(tiny_dense).run(other, max_tokens=5, ignore_eos=True).ids
    # A prompt that drops everything drops the kept state too: its pages are written over.
    tiny.run(random_ids(35, seed=10), max_tokens=1)
    assert tiny.run(other, max_tokens=5, ignore_eos=True).usage.cached_tokens == 0


def test_cancel_between_prefill_slices_and_at_each_token(tiny: Rig, tiny_dense: Path) -> None:
    ids = random_ids(60)
    turn = tiny.session.turn(tiny.plan(ids), cancelled=lambda: len(tiny.spy.steps) >= 2)
    done = drain(turn)
    assert (tiny.spy.steps, done.finish_reason, done.text, done.timings.prompt_n) == ([16, 16], "cancelled", "", 32)
    tiny.spy.steps.clear()
    turn = tiny.session.turn(tiny.plan(ids, ignore_eos=True), cancelled=lambda: len(tiny.spy.steps) >= 4)
    done = drain(turn)
    # 28 tokens were left of the prompt: two steps; then two tokens more.
    assert (tiny.spy.steps, done.finish_reason, done.usage.cached_tokens) == ([16, 12, 1, 1], "cancelled", 32)
    assert done.ids == Rig(tiny_dense).run(ids, max_tokens=3, ignore_eos=True).ids


def test_progress_of_a_prompt(tiny: Rig) -> None:
    seen: list[tuple[str, int, int]] = []
    drain(tiny.session.turn(tiny.plan(random_ids(40), max_tokens=1), progress=lambda *a: seen.append(a)))
    assert seen == [("prompt", n, 40) for n in (0, 16, 32, 40)]


def test_a_turn_that_was_overtaken_cannot_go_on(tiny: Rig) -> None:
    slow = iter(tiny.session.turn(tiny.plan("hello", max_tokens=9, ignore_eos=True)))
    next(slow)
    tiny.run("world", max_tokens=2)
    with pytest.raises(RequestError, match="another one has begun"):
        next(slow)


def test_a_failed_step_drops_the_state(tiny: Rig, tiny_dense: Path) -> None:
    ids = random_ids(40)
    tiny.run(ids, max_tokens=5, ignore_eos=True)
    tiny.spy.fail_at = len(tiny.spy.steps) + 1
    with pytest.raises(BackendError, match="made to fail"):
        tiny.run([*ids, *random_ids(30, seed=8)])
    assert tiny.session.ids == []
    done = tiny.run(ids, max_tokens=5, ignore_eos=True)
    assert done.usage.cached_tokens == 0
    assert done.ids == Rig(tiny_dense).run(ids, max_tokens=5, ignore_eos=True).ids


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
    assert rig.session.ids == []
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

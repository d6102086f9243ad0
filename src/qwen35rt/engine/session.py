"""One sequence on an executable: its token ids, state slot and pages, and the turns that extend it.

Owns what is in the state and since when a turn runs; knows nothing of other sequences, JSON or templates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..backends.base import Batch, Executable, Float, StepReport
from ..errors import BackendError, GenerationFailed, RequestError
from ..plan import Plan
from ..tokenizer.base import Tokenizer
from ..tokenizer.detok import Detokenizer
from .result import Completion, Delta, Timings, TokenLogprob, Usage
from .sampler import Sampler, make_workspace

ProgressFn = Callable[[str, int, int], None]


class Session:
    """The timeline of one sequence. Not for use by two threads at once.

    ``ids`` are the tokens whose effect is in the recurrent state and the pages. A recurrent state cannot be cut back:
    a prompt that extends ``ids`` continues from there. Where the executable has a second slot, the state at one
    position of the prompt is kept there, and a prompt that shares the tokens before it continues from it. Any other
    prompt begins with an empty state.
    """

    def __init__(self, executable: Executable, tokenizer: Tokenizer) -> None:
        limits = executable.limits
        self.executable, self.tokenizer = executable, tokenizer
        self.capacity = limits.pages * limits.page_tokens
        self.ids: list[int] = []
        self.turn_now: Turn | None = None  # the one turn that may run steps
        self.workspace = make_workspace(tokenizer.n_vocab)
        self._kept: list[int] = []  # tokens in the state of the second slot; their pages are still there
        self._pages = np.arange(limits.pages, dtype=np.int32)

    def reset(self) -> None:
        """Forget the sequence; the next step starts with an empty state and no turn goes on."""
        self.ids, self._kept, self.turn_now = [], [], None

    def resume(self, ids: Sequence[int]) -> int:
        """Go back or stay at the last kept state that ``ids`` extend, else drop all; -> tokens that are in it."""
        self.turn_now = None

        def extends(held: list[int]) -> bool:
            return len(held) < len(ids) and held == list(ids[: len(held)])

        if not extends(self.ids):
            if self._kept and extends(self._kept):
                self.executable.copy_slot(1, 0)
                self.ids = list(self._kept)
            else:
                self.reset()
        return len(self.ids)

    def keep(self) -> None:
        """Keep the present state in place of the one kept before; nothing where there is one slot only."""
        if self.executable.limits.slots > 1:
            self.executable.copy_slot(0, 1)
            self._kept = list(self.ids)

    def step(self, ids: Sequence[int], out_rows: Sequence[int] | None = None) -> tuple[Float, StepReport]:
        """Run token rows behind what is there; -> logits of the wanted rows (default: the last), valid until the next
        step, and what ran. After an error the state is dropped."""
        start = len(self.ids)
        end = start + len(ids)
        if end > self.capacity:
            raise BackendError(f"{end} tokens do not fit in the {self.capacity} of the session's pages")
        pages = self._pages[: -(-end // self.executable.limits.page_tokens)]
        batch = Batch.single(np.asarray(ids, np.int32), start, pages, 0, out_rows)
        try:
            logits, report = self.executable.run(batch)
        except BaseException:
            self.reset()  # how far the step came is not known
            raise
        self.ids.extend(ids)
        return logits, report

    def turn(
        self,
        plan: Plan,
        accepted: float | None = None,
        progress: ProgressFn | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Turn:
        """A turn that runs as it is iterated. ``accepted``: time.perf_counter() when the request came."""
        return Turn(self, plan, time.perf_counter() if accepted is None else accepted, progress, cancelled)


class Turn:
    """One prompt and its answer: iterate over its Deltas, then read ``completion``.

    ``cancelled`` is looked at between prefill slices and at each token; it ends the turn with "cancelled" and leaves
    the state usable. Logits that are not finite raise GenerationFailed and drop the state (B29).
    """

    def __init__(
        self,
        session: Session,
        plan: Plan,
        accepted: float,
        progress: ProgressFn | None,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        self.plan = plan
        self._session = session
        self._progress = progress
        self._cancelled = cancelled or (lambda: False)
        tokenizer = session.tokenizer
        self._ends = tokenizer.eog.union(plan.params.stop_token_ids)
        self._sampler = Sampler(
            plan.params,
            tokenizer.n_vocab,
            tokenizer.vocab.unused,
            tokenizer.eog,
            prompt=plan.ids,
            workspace=session.workspace,
        )
        self._detok = Detokenizer(tokenizer, plan.params.stop, plan.skip_special, plan.include_stop)
        self._accepted = accepted
        self._first_step = self._first_token = self._last_token = 0.0
        self._sent_ids = self._sent_logprobs = 0
        self._cached = self._prefilled = self._drawn = self._steps = self._gpu_steps = 0
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._finish: str | None = None
        self._stop_reason: str | int | None = None
        self._deltas = self._run()

    def __iter__(self) -> Iterator[Delta]:
        return self._deltas

    @property
    def completion(self) -> Completion:
        """The result; complete when the iteration has ended, a snapshot as "cancelled" before."""
        usage = Usage(len(self.plan.ids), len(self._ids), self._cached)
        return Completion(
            text="".join(self._text),
            ids=list(self._ids),
            finish_reason=self._finish or "cancelled",
            stop_reason=self._stop_reason,
            usage=usage,
            on_gpu=self._steps > 0 and self._gpu_steps == self._steps,
            timings=self._timings(),
            seed=self.plan.seed,
            logprobs=list(self._logprobs) if self.plan.params.logprobs is not None else None,
        )

    def _run(self) -> Iterator[Delta]:
        if self.plan.budget == 0:
            self._finish = "length"  # C22: without a step
            return
        logits = self._prefill()
        while self._finish is None and logits is not None:
            text = self._draw(logits)
            tail = self._detok.finish() if self._finish is not None else ""
            # The end is decided before the last text is handed out: no step runs after it (C32).
            yield self._delta(text + tail)
            if self._finish is None:
                if self._cancelled():
                    break
                logits = self._step([self._ids[-1]])
        if self._finish is None:
            self._finish = "cancelled"
            if rest := self._detok.finish():
                yield self._delta(rest)

    def _prefill(self) -> Float | None:
        """Logits after the last prompt token; None if cancelled."""
        session, ids = self._session, self.plan.ids
        if not self.plan.cache:
            session.reset()
        self._cached = session.resume(ids)
        session.turn_now = self
        total = len(ids) - self._cached
        logits: Float | None = None
        at = self._cached
        while at < len(ids):
            if self._cancelled():
                return None
            if self._progress is not None:
                self._progress("prompt", at - self._cached, total)
            end = min(at + session.executable.limits.rows, len(ids))
            if at < self.plan.keep_at < end:
                end = self.plan.keep_at
            logits = self._step(ids[at:end])
            at = end
            self._prefilled = at - self._cached
            if at == self.plan.keep_at:
                session.keep()
        if self._progress is not None:
            self._progress("prompt", total, total)
        return logits

    def _step(self, ids: Sequence[int]) -> Float:
        if self._session.turn_now is not self:
            raise RequestError("this turn cannot go on: another one has begun on the same session")
        if not self._steps:
            self._first_step = time.perf_counter()
        logits, report = self._session.step(ids)
        self._steps += 1
        self._gpu_steps += report.on_gpu
        row: Float = logits[0]
        return row

    def _draw(self, logits: Float) -> str:
        """Draw a token and account for it; -> text that became final."""
        try:
            drawn = self._sampler.sample(logits, self._drawn)
        except GenerationFailed as e:
            n = len(self._session.ids)
            self._session.reset()
            raise GenerationFailed(f"{e} after {n} tokens and its state dropped") from None
        self._last_token = time.perf_counter()
        if not self._drawn:
            self._first_token = self._last_token
        self._drawn += 1
        token = drawn.id
        if drawn.logprob is not None:
            self._logprobs.append(TokenLogprob(token, drawn.logprob, drawn.top or ()))
        if token in self._ends:
            self._finish = "stop"
            self._stop_reason = None if token in self._session.tokenizer.eog else token
            return ""
        self._sampler.accept(token)
        self._ids.append(token)
        text = self._detok.push(token)
        if self._detok.stopped:
            self._finish, self._stop_reason = "stop", self._detok.stop_reason
        elif len(self._ids) >= self.plan.budget:
            self._finish = "length"
        return text

    def _delta(self, text: str) -> Delta:
        self._text.append(text)
        ids, logprobs = tuple(self._ids[self._sent_ids :]), tuple(self._logprobs[self._sent_logprobs :])
        self._sent_ids, self._sent_logprobs = len(self._ids), len(self._logprobs)
        return Delta(text, ids, logprobs)

    def _timings(self) -> Timings:
        def ms(start: float, end: float) -> float | None:
            return 1e3 * (end - start) if start and end else None

        return Timings(
            cache_n=self._cached,
            prompt_n=self._prefilled,
            prompt_ms=ms(self._first_step, self._first_token),
            predicted_n=self._drawn,
            predicted_ms=ms(self._first_token, self._last_token) if self._drawn > 1 else None,
            queue_ms=ms(self._accepted, self._first_step),
            ttft_ms=ms(self._accepted, self._first_token),
        )

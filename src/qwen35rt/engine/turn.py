"""One prompt and its answer: what is drawn, the text that becomes final, where it ends, and its result.

Passive: who runs the model hands logits in. Knows nothing of slots, pages and other turns.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from ..backends.base import Best, Float, Logits, StepReport
from ..plan import Markup, Plan
from ..tokenizer.base import Tokenizer
from ..tokenizer.detok import Detokenizer
from .result import Completion, Delta, Timings, TokenLogprob, Usage
from .sampler import Sampler, check_finite, logprob_of


class Turn:
    """``ids``: the prompt and the tokens drawn after it. ``finish_reason`` is None while the turn goes on.

    ``cancelled`` and ``paused`` may be set from any thread; who runs the turn looks at them before each step.
    """

    def __init__(
        self,
        plan: Plan,
        tokenizer: Tokenizer,
        accepted: float | None = None,
        workspace: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        self.plan = plan
        self.ids = list(plan.ids)
        self.cancelled = self.paused = False
        runs = plan.budget > 0 or plan.prompt_logprobs or plan.warm
        self.finish_reason: str | None = None if runs else "length"
        self._stop_reason: str | int | None = None
        self._eog = tokenizer.eog
        self._ends = tokenizer.eog.union(plan.params.stop_token_ids)
        self._sampler = Sampler(
            plan.params,
            tokenizer.n_vocab,
            tokenizer.vocab.unused | plan.banned,
            tokenizer.eog,
            prompt=plan.ids,
            choice=plan.choice,
            workspace=workspace,
        )
        self._detok = Detokenizer(tokenizer, plan.params.stop, plan.skip_special, plan.include_stop)
        markup = plan.markup or Markup()
        self._markup = markup
        self._reasoning, self._call = markup.reasoning, False
        self._forced: list[int] = []  # next one last
        self._closing = False  # ``markup.closing`` is being written or was
        self._reasoning_tokens = 0
        self._close_reasoning()
        self._drawn: list[int] = []  # counted tokens: without a final one that ends the turn
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob | None] = [None]
        self._sent_ids = self._sent_logprobs = 0
        self._sent_prompt = False
        self._accepted = time.perf_counter() if accepted is None else accepted
        self._first_step = self._first_token = self._last_token = 0.0
        self._cached = self._prefilled = self._draws = self._steps = self._gpu_steps = 0

    @property
    def completion(self) -> Completion:
        """The result; complete once ``finish_reason`` is set, what there is so far before."""
        usage = Usage(len(self.plan.ids), len(self._drawn), self._cached, self._reasoning_tokens)
        return Completion(
            text="".join(self._text),
            ids=list(self._drawn),
            finish_reason=self.finish_reason or "cancelled",
            stop_reason=self._stop_reason,
            usage=usage,
            on_gpu=self._steps > 0 and self._gpu_steps == self._steps,
            timings=self._timings(),
            seed=self.plan.seed,
            logprobs=list(self._logprobs) if self.plan.params.logprobs is not None else None,
            prompt_logprobs=list(self._prompt_logprobs) if self.plan.prompt_logprobs else None,
        )

    @property
    def begun(self) -> bool:
        """Whether a step has been made for it."""
        return self._first_step > 0

    @property
    def generated(self) -> int:
        """Tokens drawn so far, without a final one that ends the turn."""
        return len(self._drawn)

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were taken from a kept state."""
        return self._cached

    @property
    def prompt_computed(self) -> int:
        """Tokens of the prompt that were computed so far."""
        return self._prefilled

    @property
    def needs_best(self) -> int:
        """Of how many best logits of a row a draw makes do; 0: it needs all. See Sampler.needs_best."""
        return self._sampler.needs_best

    def enough(self, best: Best) -> bool:
        """Whether the next ``draw`` may be from the largest logits of a row alone.

        A token that is forced, or is not to be drawn at all, looks no further than whether the row is sound.
        """
        return bool(self._forced) or self.plan.budget == 0 or self._sampler.enough(best)

    def began(self, cached: int) -> None:
        """Its first step comes; ``cached`` tokens of the prompt are in the state already."""
        if not self._first_step:
            self._first_step = time.perf_counter()
            self._cached = cached

    def stepped(self, report: StepReport, held: int) -> None:
        """A step computed rows of this turn, so that ``held`` tokens are in the state now."""
        self._steps += 1
        self._gpu_steps += report.on_gpu
        # A turn that lost its memory computes rows again: they count once.
        self._prefilled = max(self._prefilled, min(held, len(self.plan.ids)) - self._cached)

    def read_prompt(self, first: int, logits: Float) -> None:
        """Logits [n, n_vocab] after the prompt's tokens from number ``first`` on, without those after the last one.

        Rows that were read before are passed over. Raises GenerationFailed.
        """
        n_top = self.plan.params.logprobs or 0
        known = len(self._prompt_logprobs)
        for at, row in enumerate(logits[max(0, known - first - 1) :], known):
            token = self.plan.ids[at]
            self._prompt_logprobs.append(TokenLogprob(token, *logprob_of(row, token, n_top)))

    def draw(self, logits: Logits) -> Delta:
        """Draw the next token from logits [n_vocab], or from the largest where ``enough`` says that they are; account
        for it; -> what became final with it.

        Sets ``finish_reason`` if the turn ends here; then no further step is needed (C32). Raises GenerationFailed.
        """
        if self.plan.budget == 0:
            self.finish_reason = "length"
            return self._delta("")
        token = self._next_token(logits)
        self._last_token = time.perf_counter()
        if not self._draws:
            self._first_token = self._last_token
        self._draws += 1
        if token in self._ends:
            self.finish_reason = "stop"
            self._stop_reason = None if token in self._eog else token
            return self._delta(self._detok.finish())
        self._sampler.accept(token)
        self._drawn.append(token)
        self.ids.append(token)
        inside = self._inside
        self._read_markup(token)
        self._detok.armed = not (inside or self._inside)  # tags belong to what they enclose
        text = self._detok.push(token)
        if self._detok.stopped:
            self.finish_reason, self._stop_reason = "stop", self._detok.stop_reason
        elif self.finish_reason is None and len(self._drawn) >= self.plan.budget:
            self.finish_reason = "length"
        return self._delta(text + self._detok.finish() if self.finish_reason is not None else text)

    def cancel(self) -> Delta:
        """End the turn where it is; -> text that was held back."""
        self.finish_reason = "cancelled"
        return self._delta(self._detok.finish())

    def _next_token(self, logits: Logits) -> int:
        n_top = self.plan.params.logprobs
        if self._forced:
            token = self._forced.pop()
            check_finite(logits)
            if n_top is not None and not isinstance(logits, Best):  # see Sampler.needs_best
                self._logprobs.append(TokenLogprob(token, *logprob_of(logits, token, n_top)))
            return token
        drawn = self._sampler.sample(logits, self._draws)
        if drawn.logprob is not None:
            self._logprobs.append(TokenLogprob(drawn.id, drawn.logprob, drawn.top or ()))
        return drawn.id

    def _read_markup(self, token: int) -> None:
        markup = self._markup
        if self._reasoning or (token == markup.think and len(self._drawn) == 1):
            self._reasoning_tokens += 1
            self._reasoning = token != markup.think_end
            self._close_reasoning()
        elif token == markup.call:
            self._call = True
        elif token == markup.call_end:
            self._call = False
            if markup.one_call:
                self.finish_reason = "stop"

    @property
    def _inside(self) -> bool:
        return self._reasoning or self._call

    def _close_reasoning(self) -> None:
        """Have the closing written if the budget of reasoning is spent."""
        if self._reasoning and not self._closing and 0 <= self._markup.budget <= self._reasoning_tokens:
            self._closing = True
            self._forced = list(self._markup.closing[::-1])

    def _delta(self, text: str) -> Delta:
        if text:
            self._text.append(text)
        ids, logprobs = tuple(self._drawn[self._sent_ids :]), tuple(self._logprobs[self._sent_logprobs :])
        self._sent_ids, self._sent_logprobs = len(self._drawn), len(self._logprobs)
        prompt = None
        if self.plan.prompt_logprobs and not self._sent_prompt and len(self._prompt_logprobs) == len(self.plan.ids):
            self._sent_prompt, prompt = True, tuple(self._prompt_logprobs)
        return Delta(text, ids, logprobs, prompt, self._timings() if self.plan.timings else None)

    def _timings(self) -> Timings:
        def ms(start: float, end: float) -> float | None:
            return 1e3 * (end - start) if start and end else None

        return Timings(
            cache_n=self._cached,
            prompt_n=self._prefilled,
            prompt_ms=ms(self._first_step, self._first_token),
            predicted_n=self._draws,
            predicted_ms=ms(self._first_token, self._last_token) if self._draws > 1 else None,
            queue_ms=ms(self._accepted, self._first_step),
            ttft_ms=ms(self._accepted, self._first_token),
        )

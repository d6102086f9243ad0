"""POST /v1/completions: the request's type, prompts, plans, and the choices of the answer (completions.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import ENGINE, SamplingLimits
from ..engine.result import Completion, Delta, TokenLogprob
from ..errors import RequestError
from ..plan import Plan
from ..tokenizer import Tokenizer
from .answer import Job, Json
from .body import Body, read_body
from .errors import EmptyPrompt
from .fields import FIELDS, SamplingRequest, check_common, named_as_sent
from .logprobs import TokenLog
from .model import Loaded
from .plans import AnswerKind, Planner, check_length, tokenizing
from .record import Record
from .settings import ServerSettings

Mixed = list[int | str]
_KIND = AnswerKind("cmpl-qwen35-", "text_completion", "text_completion")


class CompletionRequest(SamplingRequest, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[str | int | Mixed] | None = None
    echo: bool = False
    logprobs: int | None = None
    parse_special: bool = True

    def sampling(self, limits: SamplingLimits) -> dict[str, Any]:
        given = super().sampling(limits)
        return given if self.logprobs is None else given | {"logprobs": self.logprobs}


def parse(raw: bytes, settings: ServerSettings) -> Body[CompletionRequest]:
    """Everything that can be checked without a model."""
    body = read_body(raw, CompletionRequest, FIELDS, max_depth=settings.max_json_depth, strict=settings.strict_fields)
    check_common(body.value, body.names, settings.sampling_limits)
    read_prompts(body.value.prompt, settings.max_prompts)
    return body


def read_prompts(prompt: str | Sequence[str | int | Mixed] | None, most: int) -> list[str | Mixed]:
    """The prompts of a request, each a text or a list of ids and texts (C15, C16)."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise EmptyPrompt("a prompt is needed", "prompt")
    if all(isinstance(p, int) for p in prompt):
        return [list(prompt)]  # type: ignore[arg-type]
    if any(isinstance(p, int) for p in prompt):
        raise RequestError('ids and texts of one prompt belong in an inner list: [[1, "text"]]', "prompt")
    if len(prompt) > most:
        raise RequestError(f"there are {len(prompt)} prompts; at most {most} are allowed", "prompt")
    return list(prompt)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Prompt:
    """A tokenised prompt. ``unsent``: tokens in front that the client did not send."""

    ids: list[int]
    unsent: int
    text: str = ""


def tokenize(model: Loaded, prompt: str | Mixed, special: bool, param: str, echo: bool = False) -> Prompt:
    """Ids of a prompt; its text too if it is to be echoed. Raises RequestErrors that name ``param``."""
    tokenizer, n_ctx = model.tokenizer, model.facts.n_ctx
    parts: Sequence[int | str] = [prompt] if isinstance(prompt, str) else prompt
    bound = sum(1 if isinstance(p, int) else model.fewest_tokens(p) for p in parts)
    check_length(bound, n_ctx, exact=all(isinstance(p, int) for p in parts))
    vocab = tokenizer.vocab
    unsent = int(vocab.add_bos and vocab.bos is not None and bool(parts) and isinstance(parts[0], str))
    ids = [vocab.bos] if unsent and vocab.bos is not None else []
    for at, part in enumerate(parts):
        if isinstance(part, int):
            if not 0 <= part < tokenizer.n_vocab:
                where = f"{param}[{at}]"
                raise RequestError(f"{where} is no token id: 0 to {tokenizer.n_vocab - 1} are", where)
            ids.append(part)
        else:
            with tokenizing():
                ids += tokenizer.encode(part, special=special)
    if len(ids) == unsent:
        raise EmptyPrompt("the prompt is empty: it has no tokens", param)
    text = ""
    if echo:
        text = prompt if isinstance(prompt, str) else tokenizer.decode(ids[unsent:], skip_special=False)
    return Prompt(ids, unsent, text)


def build(body: Body[CompletionRequest], model: Loaded, settings: ServerSettings, record: Record) -> Job:
    """Tokenise and check against the model: after this nothing is left that could be refused. Runs off the loop."""
    with named_as_sent(body.names):
        return _build(body.value, model, settings, record)


def _build(request: CompletionRequest, model: Loaded, settings: ServerSettings, record: Record) -> Job:
    limit = ENGINE.max_tokens if settings.max_tokens_default is None else settings.max_tokens_default
    planner = Planner.of(request, model.facts, settings.sampling, model.facts.metadata, limit, settings.sampling_limits)
    prompts = read_prompts(request.prompt, settings.max_prompts)
    plans: list[Plan] = []
    writers = []
    for index, given in enumerate(prompts):
        param = f"prompt[{index}]" if len(prompts) > 1 else "prompt"
        prompt = tokenize(model, given, request.parse_special, param, request.echo)
        plan = planner.plan(prompt.ids, prompt_logprobs=request.echo and request.logprobs is not None)
        plans.append(plan)
        writers.append(CompletionWriter(index, model.tokenizer, plan, prompt, request))
    return planner.job(_KIND, record, plans, writers)


class CompletionWriter:
    """One choice of a text completion, in chunks or whole (a ChoiceWriter)."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, plan: Plan, prompt: Prompt, request: CompletionRequest
    ) -> None:
        self._index, self._prompt = index, prompt  # whose text is empty unless it is echoed
        self._return_ids = request.return_token_ids
        self._log: TokenLog | None = None
        if request.logprobs is not None:
            silent = tokenizer.eog.union(plan.params.stop_token_ids)
            self._log = TokenLog(tokenizer, plan.skip_special, silent, 0 if plan.prompt_logprobs else len(prompt.text))
        self._with_prompt = plan.prompt_logprobs
        self._chars = 0  # of the choice's text, sent so far
        self._ids: list[int] = []  # drawn, not sent yet
        self._sent_prompt_ids = False

    def begin(self) -> list[Json]:
        # With log-probabilities the prompt goes out in one chunk with them, which is the first too.
        return [self._chunk(self._prompt.text)] if self._prompt.text and not self._with_prompt else []

    def delta(self, delta: Delta) -> list[Json]:
        chunks = []
        if delta.prompt_logprobs is not None:
            self._add_prompt(delta.prompt_logprobs)
            chunks.append(self._chunk(self._prompt.text))
        self._take(delta.ids, delta.logprobs)
        return [*chunks, self._chunk(delta.text)] if delta.text else chunks

    def finish(self, completion: Completion) -> list[Json]:
        end = self._chunk("", last=True)
        return [end | {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}]

    def failed(self) -> Json:
        return self._chunk("") | {"finish_reason": "error"}

    def whole(self, completion: Completion) -> Json:
        if completion.prompt_logprobs is not None:
            self._add_prompt(completion.prompt_logprobs)
        self._take(completion.ids, completion.logprobs or ())
        text = self._prompt.text + completion.text
        choice = self._chunk(text, last=True)
        return choice | {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}

    def _add_prompt(self, logprobs: Sequence[TokenLogprob | None]) -> None:
        if self._log is not None:
            prompt = self._prompt
            self._log.add_prompt(prompt.ids, logprobs, prompt.unsent, len(prompt.text))

    def _take(self, ids: Iterable[int], logprobs: Iterable[TokenLogprob]) -> None:
        if self._log is not None:
            self._log.add(logprobs)
        self._ids += ids

    def _chunk(self, text: str, *, last: bool = False) -> Json:
        self._chars += len(text)
        log = None
        if self._log is not None:
            log = self._log.take(self._chars, last=last) or (self._log.none() if last else None)
        choice: Json = {"index": self._index, "text": text, "finish_reason": None, "stop_reason": None, "logprobs": log}
        if self._return_ids:
            if not self._sent_prompt_ids:
                self._sent_prompt_ids = True
                choice["prompt_token_ids"] = self._prompt.ids
            choice["token_ids"], self._ids = self._ids, []
        return choice

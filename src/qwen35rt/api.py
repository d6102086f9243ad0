"""The Python interface: load() and Model. One caller at a time drives a core of the engine, under a lock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from .backends.base import Batch, Float, Int, KvType
from .config import ENGINE
from .engine.core import Core, Event
from .engine.result import Completion, Delta
from .engine.sampler import make_workspace
from .engine.sizes import pool_limits
from .engine.turn import Turn
from .errors import ContextLengthExceeded, EngineStopped, RequestError, TemplateError
from .parts import Parts, check_count, open_parts
from .plan import Plan, check_ids, make_plan, sampling_params
from .tokenizer import ChatTemplate, Tokenizer

Message = Mapping[str, Any]
ProgressFn = Callable[[str, int, int], None]


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    threads: int | None = None,
    isa: str | None = None,
    n_ctx: int | None = None,
    n_batch: int | None = None,
    kv_dtype: KvType = "f16",
    progress: ProgressFn | None = None,
    n_gpu_layers: int | str | None = None,
) -> Model:
    """Open a model.

    ``path``: a GGUF file, any part of a split one, or a folder that holds one model; None: the embedded
    model of the package. ``device``: "auto" (CUDA if it works, else CPU), "cpu", "cuda" or "reference" (NumPy).
    ``n_gpu_layers``: the first so many layers on the GPU, the rest on the CPU; -1 or "all", default: all; 0: none.
    ``threads``, ``isa``: CPU threads and instruction level, by default what the machine allows and its best.
    ``n_ctx``: context in tokens, at most the model's own; 0: the model's own; default 4,096. ``n_batch``: tokens of one
    prefill step, default 512. ``kv_dtype``: "f16", or "f32" for keys and values without rounding at twice the memory.
    ``progress``: called with a stage, done and total while the file is read into memory, else it is read as it is used.
    Raises ModelFileError or UnsupportedModel for the file, BackendUnavailable for the device, ConfigError for the rest.
    """
    rows = ENGINE.n_batch if n_batch is None else n_batch
    check_count("n_batch", rows, 1)
    return Model(open_parts(path, device, threads, isa, n_ctx, progress, n_gpu_layers), rows, kv_dtype)


_Loan = tuple[ExitStack, int, Int]  # a slot and pages of the core that no turn has, and what gives them back


class Model:
    """An open model that runs one sequence at a time. Calls from several threads wait for each other; streams that are
    read in turns share it, each going on where it was.

    ``path``, ``metadata``, ``n_ctx``, ``n_vocab`` describe it. Use it as a context manager or call ``close``.
    """

    def __init__(self, parts: Parts, n_batch: int = ENGINE.n_batch, kv_dtype: KvType = "f16") -> None:
        source, tokenizer, choice = parts.source, parts.tokenizer, parts.choice
        self.parts = parts
        self.path: Path = source.path
        self.metadata: Mapping[str, Any] = source.file.metadata
        self.n_ctx, self.n_vocab, self.description = parts.n_ctx, tokenizer.n_vocab, source.description
        self.device, self.device_description = choice.backend.name, choice.description
        self._source, self._tokenizer, self._template = source, tokenizer, parts.template
        state = source.program.state
        page_bytes = state.page_bytes(ENGINE.page_tokens, 2 if kv_dtype == "f16" else 4)
        limits = pool_limits(
            source.program, self.n_ctx, n_batch, 1, self._cache_bytes(state.state_bytes(), page_bytes), kv_dtype
        )
        self._executable = choice.backend.compile(source.program, limits)
        self._workspace = make_workspace(self.n_vocab)
        self._core = self._new_core()
        self._loan: _Loan | None = None
        self._lock = threading.RLock()
        self._closed = False

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back, with what the vocabulary says of its tokens."""
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether the file has a chat template, which ``chat`` needs."""
        return self._template is not None

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        """Ids of a text. ``special``: text that spells a control token, such as ``<|im_end|>``, becomes that token."""
        return self._tokenizer.encode(text, special=special)

    def detokenize(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of ids; control tokens are left out unless ``special``."""
        return self._tokenizer.decode(ids, skip_special=not special)

    def logits(self, ids: Sequence[int] | npt.NDArray[Any]) -> Float:
        """Logits after each of ``ids``, from an empty state: float32 [len(ids), n_vocab]."""
        ids = _as_list(ids)
        with self._lock:
            slices = self.logits_slices(ids)
            out = np.empty((len(ids), self.n_vocab), np.float32)
            at = 0
            for piece in slices:
                out[at : at + len(piece)] = piece
                at += len(piece)
        return out

    def logits_slices(self, ids: Sequence[int] | npt.NDArray[Any], first: int = 0) -> Iterator[Float]:
        """Logits after each of ``ids[first:]``, from an empty state, for texts whose logits do not fit in memory.

        -> float32 [n, n_vocab] for the next n ids in order, each array valid until the next one is asked for. Another
        call on the model in between ends the iteration with a RequestError.
        """
        ids = _as_list(ids)
        check_ids(ids, self.n_vocab)
        if len(ids) > self.n_ctx:
            raise ContextLengthExceeded(len(ids), self.n_ctx)
        return self._logits_slices(ids, first)

    def _logits_slices(self, ids: list[int], first: int) -> Iterator[Float]:
        limits = self._executable.limits
        loan: _Loan | None = None
        at = 0
        try:
            while at < len(ids):
                with self._lock:
                    self._check_open()
                    if loan is None:
                        loan = self._borrow(len(ids))
                    elif loan is not self._loan:
                        raise RequestError("the logits cannot go on: another call has begun on the same model")
                    n = min(limits.rows, first - at) if at < first else min(limits.out_rows, len(ids) - at)
                    rows = range(n) if at >= first else ()
                    logits, _ = self._executable.run(Batch.single(ids[at : at + n], at, loan[2], loan[1], rows))
                if at >= first:
                    yield logits
                at += n
        finally:
            with self._lock:
                if loan is self._loan:
                    self._give_back()

    def _borrow(self, tokens: int) -> _Loan:
        """A slot and pages outside of any turn, until the next call on the model."""
        self._give_back()
        stack = ExitStack()
        slot, pages = stack.enter_context(self._core.lend(tokens))
        self._loan = (stack, slot, pages)
        return self._loan

    def _give_back(self) -> None:
        if self._loan is not None:
            self._loan[0].close()
            self._loan = None

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Completion:
        """Continue a text or token ids; see ``stream`` for the options. No chat template is applied."""
        return self._finish(self.stream(prompt, **options))

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        parse_special: bool = True,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        cache_prompt: bool = True,
        progress: ProgressFn | None = None,
        cancelled: Callable[[], bool] | None = None,
        **sampling: Any,
    ) -> Stream:
        """Continue a text or token ids, piece by piece.

        ``max_tokens``: default 256; -1: to the end of the context. ``sampling``: temperature, top_k, top_p, min_p,
        repeat_penalty, repeat_last_n, presence_penalty, frequency_penalty, seed, stop (a text or a list),
        stop_token_ids, min_tokens, ignore_eos, logit_bias, logprobs; absent ones take the model file's value, else the
        default.
        ``parse_special``: text of the prompt that spells a control token becomes it. ``progress``: called with
        "prompt", done and total tokens. ``cancelled``: asked between prefill steps and at each token.
        Raises RequestError naming the field, ContextLengthExceeded, before anything runs.
        """
        accepted = time.perf_counter()
        params = sampling_params(sampling, self.metadata, self.n_vocab)
        plan = make_plan(
            self._prompt_ids(prompt, parse_special),
            params,
            self.n_ctx,
            self.n_vocab,
            max_tokens=max_tokens,
            include_stop=include_stop,
            skip_special=skip_special_tokens,
            cache=cache_prompt,
        )
        return self._start(plan, accepted, progress, cancelled)

    def chat(self, messages: Sequence[Message], **options: Any) -> Completion:
        """Answer a conversation; see ``chat_stream`` for the options."""
        return self._finish(self.chat_stream(messages, **options))

    def chat_stream(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        enable_thinking: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        cache_prompt: bool = True,
        progress: ProgressFn | None = None,
        cancelled: Callable[[], bool] | None = None,
        **sampling: Any,
    ) -> Stream:
        """Answer a conversation, piece by piece: a list of {"role": ..., "content": ...} in the model's own template.

        Control tokens spelled in messages stay plain text. ``enable_thinking`` and ``template_options`` go to the
        template; None leaves the choice to it. The other options are those of ``stream``. The text includes the
        reasoning where the model writes one.
        Raises TemplateError if the model has no template or the template refuses, else what ``stream`` raises.
        """
        accepted = time.perf_counter()
        params = sampling_params(sampling, self.metadata, self.n_vocab)
        given = dict(template_options or {})
        if enable_thinking is not None:
            given["enable_thinking"] = enable_thinking
        ids, keep_at = self._need_template().chat_prompt(self._tokenizer, messages, tools, **given)
        plan = make_plan(
            ids,
            params,
            self.n_ctx,
            self.n_vocab,
            max_tokens=max_tokens,
            include_stop=include_stop,
            skip_special=skip_special_tokens,
            cache=cache_prompt,
            keep_at=keep_at,
        )
        return self._start(plan, accepted, progress, cancelled)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **template_options: Any) -> str:
        """The prompt that ``chat`` would give the model, as text."""
        return self._need_template().render(messages, tools, **template_options)

    def close(self) -> None:
        """Release threads, memory and the file; the model cannot be used afterwards."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._executable.close()
                self._source.file.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(
        self, plan: Plan, accepted: float, progress: ProgressFn | None, cancelled: Callable[[], bool] | None
    ) -> Stream:
        self._check_open()
        return Stream(self, Turn(plan, self._tokenizer, accepted, self._workspace), progress, cancelled)

    def _step(self, turn: Turn) -> list[Event]:
        """One step for a turn; -> what happened to it. Others are paused meanwhile, as they are between their steps."""
        self._give_back()
        core = self._core
        if not turn.begun and turn not in core.waiting:
            core.add(turn)
        turn.paused = False
        try:
            return [event for of, event in core.step() if of is turn]
        except BaseException:  # how far the step came is not known: all that is in the pools is lost
            self._core = self._new_core()
            for other in [*(s.turn for s in core.running), *core.waiting]:
                if other is not turn:
                    self._core.add(other)
            raise
        finally:
            turn.paused = True

    def _new_core(self) -> Core:
        exe = self._executable
        return Core(exe, self._tokenizer, 1, self._cache_bytes(exe.state_bytes, exe.page_bytes))

    def _cache_bytes(self, state_bytes: int, page_bytes: int) -> int:
        return ENGINE.cache_states * state_bytes + -(-self.n_ctx // ENGINE.page_tokens) * page_bytes

    def _finish(self, stream: Stream) -> Completion:
        with self._lock:
            for _ in stream:
                pass
        return stream.completion

    def _prompt_ids(self, prompt: str | Sequence[int], parse_special: bool) -> list[int]:
        if not isinstance(prompt, str):
            return _as_list(prompt)
        ids = self._tokenizer.encode(prompt, special=parse_special)
        vocab = self._tokenizer.vocab
        return [vocab.bos, *ids] if vocab.add_bos and vocab.bos is not None else ids

    def _need_template(self) -> ChatTemplate:
        if self._template is None:
            raise TemplateError(
                f"{self.path.name} has no chat template (tokenizer.chat_template); use generate or stream with a text",
                "messages",
            )
        return self._template

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("the model is closed")


def _as_list(ids: Sequence[int] | npt.NDArray[Any]) -> list[int]:
    """Ids as Python integers; arrays of NumPy are welcome, and its integers, as argmax gives them."""
    return [int(i) if isinstance(i, np.integer) else i for i in ids]


class Stream:
    """An iterator over the pieces of an answer; ``completion`` holds the result once it has ended.

    One that is closed, or that nobody holds any more, is cancelled.
    """

    def __init__(
        self, model: Model, turn: Turn, progress: ProgressFn | None, cancelled: Callable[[], bool] | None
    ) -> None:
        self._model, self._turn = model, turn
        self._progress, self._cancelled = progress, cancelled
        self._shown = -1  # tokens of the prompt that were reported
        self._ended = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._ended:
            with self._model._lock:
                text = self._advance()
            if text:
                return text
        raise StopIteration

    def close(self) -> None:
        """Stop here; ``completion`` then says "cancelled" unless the answer had ended."""
        self._turn.cancelled = self._ended = True

    def __del__(self) -> None:
        self._turn.cancelled = True

    @property
    def completion(self) -> Completion:
        """The result of the turn: complete at the end, what there is so far before."""
        return self._turn.completion

    def _advance(self) -> str:
        """One step; -> text that became final with it."""
        self._model._check_open()
        turn = self._turn
        if self._cancelled is not None and turn.finish_reason is None and self._cancelled():
            turn.cancelled = True
        self._report()
        text = ""
        try:
            for event in self._model._step(turn):
                if isinstance(event, Delta):
                    text += event.text
                else:
                    self._ended = True
                    if not isinstance(event, Completion):
                        raise event
        except BaseException:
            self._ended = True
            raise
        self._report()
        return text

    def _report(self) -> None:
        """Progress of the prompt, without what came from a kept state."""
        turn = self._turn
        done = turn.prompt_computed
        if self._progress is not None and turn.finish_reason != "cancelled" and done > self._shown:
            self._shown = done
            self._progress("prompt", done, len(turn.plan.ids) - turn.cached)

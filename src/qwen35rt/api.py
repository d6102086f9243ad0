"""The Python interface: load() and Model. Puts file, tokeniser, template, device and session together."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from .backends.base import Float, KvType, Limits
from .config import ENGINE
from .device import Choice, choose_device
from .engine.result import Completion
from .engine.session import Session, Turn
from .errors import ConfigError, ContextLengthExceeded, EngineStopped, ModelFileError, RequestError, TemplateError
from .model.example import example_model
from .model.gguf_file import GgufFile, open_gguf
from .model.source import Source, open_source
from .plan import Plan, check_ids, make_plan, sampling_params
from .tokenizer import ChatTemplate, Tokenizer, build_tokenizer, read_chat_template

log = logging.getLogger(__name__)

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
) -> Model:
    """Open a model.

    ``path``: a GGUF file, any part of a split one, or a folder that holds one model; None: a tiny example model that is
    built in the cache folder. ``device``: "auto" (CUDA if it works, else CPU), "cpu", "cuda" or "reference" (NumPy).
    ``threads``, ``isa``: CPU threads and instruction level, by default what the machine allows and its best.
    ``n_ctx``: context in tokens, at most the model's own; 0: the model's own; default 4,096. ``n_batch``: tokens of one
    prefill step, default 512. ``kv_dtype``: "f16", or "f32" for keys and values without rounding at twice the memory.
    ``progress``: called with a stage, done and total while the file is read into memory;
    without it the file is read as it is used.
    Raises ModelFileError or UnsupportedModel for the file, BackendUnavailable for the device, ConfigError for the rest.
    """
    choice = choose_device(device, threads, isa)
    log.info("%s", choice.description)
    rows = ENGINE.n_batch if n_batch is None else n_batch
    for name, value, low in (("n_ctx", n_ctx, 0), ("n_batch", rows, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
            raise ConfigError(f"{name} is {value!r}; a whole number of at least {low} is needed")
    if path is None:
        log.info("no model was named: a tiny example model is used, which only shows that things work")
    source = open_source(path, progress)
    tokenizer = _tokenizer(source.file)
    if tokenizer.n_vocab != source.program.n_vocab:
        raise ModelFileError(
            f"{source.path}: the tokenizer has {tokenizer.n_vocab} tokens and the model {source.program.n_vocab}"
        )
    return Model(source, tokenizer, choice, _context(n_ctx, source), rows, kv_dtype)


def open_tokenizer(path: str | os.PathLike[str] | None = None) -> Tokenizer:
    """The tokeniser of a model file (None: the example model) without its weights."""
    with open_gguf(example_model() if path is None else path) as file:
        return _tokenizer(file)


def _tokenizer(file: GgufFile) -> Tokenizer:
    """The file's tokeniser; errors name the file."""
    with _naming(file):
        return build_tokenizer(file.metadata)


@contextmanager
def _naming(file: GgufFile) -> Iterator[None]:
    """Faults of keys that are read without their file name it too."""
    try:
        yield
    except ModelFileError as e:
        if str(file.path) in str(e):
            raise
        raise type(e)(f"{file.path}: {e}") from None


def _context(asked: int | None, source: Source) -> int:
    own = source.hparams.n_ctx_train
    if asked == 0:
        return own
    if asked is not None and asked > own:
        log.warning("the context is %d tokens: the model has no more, %d were asked for", own, asked)
    return min(own, ENGINE.n_ctx if asked is None else asked)


class Model:
    """An open model with one sequence. Calls from several threads wait for each other.

    ``path``, ``metadata``, ``n_ctx``, ``n_vocab`` describe it. Use it as a context manager or call ``close``.
    """

    def __init__(
        self, source: Source, tokenizer: Tokenizer, choice: Choice, n_ctx: int, n_batch: int, kv_dtype: KvType = "f16"
    ) -> None:
        self.path: Path = source.path
        self.metadata: Mapping[str, Any] = source.file.metadata
        self.n_ctx, self.n_vocab = n_ctx, tokenizer.n_vocab
        self.device, self.device_description = choice.backend.name, choice.description
        self.description = source.description
        self._source = source
        self._tokenizer = tokenizer
        with _naming(source.file):
            self._template: ChatTemplate | None = read_chat_template(self.metadata, tokenizer.vocab)
        # Two slots: the second keeps a state for prompts that share the beginning.
        limits = Limits(
            rows=min(n_batch, n_ctx),
            out_rows=min(n_batch, n_ctx, ENGINE.logits_rows),
            slots=2,
            pages=-(-n_ctx // ENGINE.page_tokens),
            page_tokens=ENGINE.page_tokens,
            kv_dtype=kv_dtype,
        )
        self._executable = choice.backend.compile(source.program, limits)
        self._session = Session(self._executable, tokenizer)
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
        session, limits = self._session, self._executable.limits
        at = 0
        while at < len(ids):
            with self._lock:
                self._check_open()
                if at == 0:
                    session.reset()
                elif session.ids != ids[:at]:
                    raise RequestError("the logits cannot go on: another call has begun on the same model")
                n = min(limits.rows, first - at) if at < first else min(limits.out_rows, len(ids) - at)
                logits, _ = session.step(ids[at : at + n], range(n) if at >= first else ())
            if at >= first:
                yield logits
            at += n

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
        ids, keep_at = self._chat_ids(messages, tools, enable_thinking, template_options or {})
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
                self._session.reset()
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
        return Stream(self._session.turn(plan, accepted, progress, cancelled), self._lock)

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

    def _chat_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        enable_thinking: bool | None,
        options: Mapping[str, Any],
    ) -> tuple[list[int], int]:
        """-> ids of the prompt, and where its last message ends: the next prompt most likely shares what is before."""
        template = self._need_template()
        given = dict(options)
        if enable_thinking is not None:
            given["enable_thinking"] = enable_thinking
        ids = template.render_ids(self._tokenizer, messages, tools, **given)
        before = template.render_ids(self._tokenizer, messages, tools, add_generation_prompt=False, **given)
        return ids, len(before) if ids[: len(before)] == before else 0

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
    """Ids as Python integers; arrays of NumPy are welcome."""
    return list(ids.tolist()) if isinstance(ids, np.ndarray) else list(ids)


class Stream:
    """An iterator over the pieces of an answer; ``completion`` holds the result once it has ended."""

    def __init__(self, turn: Turn, lock: AbstractContextManager[Any]) -> None:
        self._turn, self._lock = turn, lock
        self._deltas = iter(turn)
        self._ended = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._ended:
            with self._lock:
                delta = next(self._deltas, None)
            if delta is None:
                self._ended = True
            elif delta.text:
                return delta.text
        raise StopIteration

    def close(self) -> None:
        """Stop here; ``completion`` then says "cancelled" unless the answer had ended."""
        self._ended = True

    @property
    def completion(self) -> Completion:
        """The result of the turn: complete at the end, what there is so far before."""
        return self._turn.completion

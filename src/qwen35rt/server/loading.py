"""Makes a served model from the settings: file, device, sizes of pools and cache, engine, a first step, facts.

Runs in the loading thread. The only part of the server that knows how an engine is built.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

from ..backends.base import Executable, Limits
from ..config import ENGINE, SERVER
from ..device import Choice
from ..engine.engine import Engine, EngineSettings
from ..engine.result import Completion, Delta
from ..engine.sampler import SamplingParams
from ..engine.sizes import pool_limits
from ..errors import BackendError, ConfigError, OutOfMemory, Qwen35Error, TemplateError
from ..machine import cpu_name
from ..model.embedded import is_embedded
from ..model.program import Program
from ..model.source import recipe
from ..parts import Parts, open_parts, room_bytes
from ..plan import make_plan
from ..tokenizer import ChatTemplate, read_chat_template
from .model import Loaded, ModelFacts
from .service import Service
from .settings import ServerSettings

log = logging.getLogger(__name__)

Path_ = str | os.PathLike[str] | None
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_HASHED_BYTES = 1 << 20  # metadata and the first tensors; all of a large file would take minutes


def make_service(settings: ServerSettings, path: Path_ | Callable[[], Path_]) -> Service:
    """A service that will load ``path`` (None: the embedded model); a callable is asked for it first."""

    def report(stage: str, done: int, total: int) -> None:
        service.progress = done / total if total else 0.0

    def load() -> Loaded:
        return open_model(settings, path() if callable(path) else path, report)

    service = Service(settings, load)
    return service


def open_model(
    settings: ServerSettings, path: Path_ = None, report: Callable[[str, int, int], None] | None = None
) -> Loaded:
    """Read ``path`` (None: the one of the settings), start the engine and run a step: nothing is left for the first
    request (C6).

    ``report``: called with a stage, done and total. Raises ModelFileError, BackendError and ConfigError.
    """
    asked = 0 if settings.ctx_size is None else settings.ctx_size
    parts = open_parts(
        settings.model if path is None else path,
        settings.device,
        settings.threads,
        settings.isa,
        asked,
        report,
        settings.n_gpu_layers,
    )
    source, choice, tokenizer = parts.source, parts.choice, parts.tokenizer
    program, parallel = source.program, settings.parallel
    free = room_bytes(choice, program)
    if settings.cache_ram is None:
        cache_bytes = free // SERVER.cache_share
    else:
        cache_bytes = settings.cache_ram << 20
    n_ctx = _context(settings, parts, free // 2)
    limits = pool_limits(
        program,
        n_ctx,
        settings.batch_size,
        parallel,
        cache_bytes,
        settings.kv_dtype,
        free // 2 + cache_bytes,
    )
    template = _template(settings, parts)
    engine = Engine(
        _opener(choice, program, limits),
        tokenizer,
        EngineSettings(parallel=parallel, queue=settings.queue_places, cache_bytes=cache_bytes),
    )
    engine.start()

    def close() -> None:
        engine.stop()
        source.file.close()

    try:
        if not engine.wait_ready():
            raise BackendError(f"{source.path}: the engine did not start: {engine.reason}")
        tokenizer.warm()
        _first_step(engine, n_ctx, tokenizer.n_vocab)
        facts = _facts(settings, parts, n_ctx)
    except BaseException:
        close()
        raise
    log.info("%s", choice.description)
    return Loaded(facts, tokenizer, engine, template, close)


def _opener(choice: Choice, program: Program, limits: Limits) -> Callable[[], Executable]:
    """What the engine opens its executable with, on one device for good: after a fault it must pass its test again."""
    opened = False

    def open_executable() -> Executable:
        nonlocal opened
        if opened:
            choice.retest()
        opened = True
        return choice.backend.compile(program, limits)

    return open_executable


def _context(settings: ServerSettings, parts: Parts, room: int) -> int:
    """The model's own context or --ctx-size, and no more than a request can have in ``room`` bytes (C19)."""
    state = parts.source.program.state
    page = state.page_bytes(ENGINE.page_tokens, 2 if settings.kv_dtype == "f16" else 4)
    if not page:
        return parts.n_ctx
    most = (room - settings.parallel * state.state_bytes()) // page * ENGINE.page_tokens
    if most >= parts.n_ctx:
        return parts.n_ctx
    if most < ENGINE.page_tokens:
        raise OutOfMemory(f"{room >> 20} MiB are free for sequences; {settings.parallel} of them need more")
    log.warning("the context is %d tokens: memory for %d is not free", most, parts.n_ctx)
    return int(most)


def _template(settings: ServerSettings, parts: Parts) -> ChatTemplate | None:
    """The chat template of the flags, else the file's."""
    text, name = settings.chat_template, settings.chat_template_file
    if text is not None and name is not None:
        raise ConfigError("--chat-template and --chat-template-file name two templates; give one")
    if name is not None:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"--chat-template-file {name}: {e}") from None
    if text is None:
        return parts.template
    template = read_chat_template({"tokenizer.chat_template": text}, parts.tokenizer.vocab)
    try:
        if template is not None:
            template.check()  # a file's own may be broken, and completions still work; this one was asked for
    except TemplateError as e:
        raise ConfigError(f"--chat-template{'-file' if name else ''}: {e}") from None
    return template


def _first_step(engine: Engine, n_ctx: int, n_vocab: int) -> None:
    """One token, whose error is the server's: a device that fails does so now. It leaves no trace in the counters."""
    ended = threading.Event()
    events: list[Delta | Completion | Qwen35Error] = []

    def sink(index: int, event: Delta | Completion | Qwen35Error) -> None:
        events.append(event)
        if not isinstance(event, Delta):
            ended.set()

    plan = make_plan([0], SamplingParams(seed=0), n_ctx, n_vocab, max_tokens=1, cache=False)
    engine.submit(plan, sink, request_id="first-step")
    ended.wait()
    if isinstance(events[-1], Qwen35Error):
        raise BackendError(f"the first step of the model failed: {events[-1]}")
    engine.counters.reset()


def _told(name: str) -> str:
    """A name as answers can hold it: a file's may be any bytes, and JSON has none that are not UTF-8."""
    return name.encode("utf-8", "replace").decode("utf-8")


def _facts(settings: ServerSettings, parts: Parts, n_ctx: int) -> ModelFacts:
    source, choice = parts.source, parts.choice
    names = tuple(_told(name) for name in settings.alias or (_PART.sub("", source.path.stem),))
    with source.path.open("rb") as file:
        digest = hashlib.sha256(file.read(_HASHED_BYTES))
        stat = os.fstat(file.fileno())
    digest.update(stat.st_size.to_bytes(8, "little"))
    return ModelFacts(
        id=names[0],
        aliases=names[1:],
        n_ctx=n_ctx,
        n_vocab=parts.tokenizer.n_vocab,
        device=choice.backend.name,
        device_name=choice.device_name or cpu_name(),
        n_gpu_layers=choice.gpu_layers,
        n_layers=source.n_layers,
        reason=choice.reason,
        isa=choice.isa or "",
        threads=choice.threads,
        file_name=_told(source.path.name),
        hash=digest.hexdigest(),
        quant=recipe(source.file),
        vocab_type=parts.tokenizer.vocab.model,
        n_ctx_train=source.hparams.n_ctx_train,
        n_embd=source.hparams.n_embd,
        n_params=source.params,
        size=source.tensor_bytes,
        created=int(stat.st_mtime),
        # The recommended values are for models that vary what they say; this one has one right answer.
        preset="off" if is_embedded(source.path) else "general",
        metadata=source.file.metadata,
    )

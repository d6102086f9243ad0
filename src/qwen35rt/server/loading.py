"""Makes a served model from the settings: file, tokeniser, engine on its device, facts. Runs in the loading thread."""

from __future__ import annotations

import hashlib
from pathlib import Path

import psutil

from ..engine.engine import Engine, EngineSettings
from ..engine.sizes import pool_limits
from ..errors import BackendUnavailable
from ..model.gguf_file import GgufFile
from ..model.source import recipe
from ..parts import Parts, open_parts
from .model import Loaded, ModelFacts
from .settings import ServerSettings

_HASHED_BYTES = 1 << 20  # at either end of a file: enough to tell models apart, and read at once


def open_model(settings: ServerSettings) -> Loaded:
    """Open the model and wait until its engine runs. Raises ModelFileError, BackendError, ConfigError."""
    parts = open_parts(settings.model, settings.device, settings.threads, settings.isa, settings.ctx_size)
    program, free = parts.source.program, psutil.virtual_memory().available
    cache_bytes = free // 4 if settings.cache_ram is None else settings.cache_ram << 20
    limits = pool_limits(
        program,
        parts.n_ctx,
        settings.batch_size,
        settings.parallel,
        cache_bytes,
        settings.kv_dtype,
        memory_bytes=free - free // 8,
    )
    engine = Engine(
        lambda: parts.choice.backend.compile(program, limits),
        parts.tokenizer,
        EngineSettings(parallel=settings.parallel, queue=settings.queue_places, cache_bytes=cache_bytes),
    )
    parts.tokenizer.warm()
    engine.start()
    if not engine.wait_ready():
        engine.stop()
        parts.source.file.close()
        raise BackendUnavailable(engine.reason or "the engine did not start")

    def close() -> None:
        engine.stop()
        parts.source.file.close()

    return Loaded(facts_of(parts, settings), parts.tokenizer, engine, parts.template, close)


def facts_of(parts: Parts, settings: ServerSettings) -> ModelFacts:
    """What reports and answers say of a model."""
    source, choice = parts.source, parts.choice
    names = settings.alias or (source.path.name.removesuffix(".gguf"),)
    return ModelFacts(
        id=names[0],
        aliases=names[1:],
        n_ctx=parts.n_ctx,
        n_vocab=parts.tokenizer.n_vocab,
        device=choice.backend.name,
        file_name=source.path.name,
        hash=_digest(source.path),
        reason=choice.reason,
        isa=choice.isa or "",
        quant=recipe(source.file),
        threads=choice.threads,
        vocab_type=parts.tokenizer.vocab.model,
        n_ctx_train=source.hparams.n_ctx_train,
        n_embd=source.hparams.n_embd,
        n_params=source.params,
        size=_bytes(source.file),
        created=int(source.path.stat().st_mtime),
        metadata=source.file.metadata,
    )


def _bytes(file: GgufFile) -> int:
    return sum(t.nbytes for t in file.tensors.values())


def _digest(path: Path) -> str:
    """Tells one file from another; not proof against somebody who wants two to look alike."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_HASHED_BYTES))
        file.seek(max(0, size - _HASHED_BYTES))
        digest.update(file.read(_HASHED_BYTES))
    return digest.hexdigest()

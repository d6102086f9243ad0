"""Opens a model file and what belongs to it, for the Python interface and for the server alike."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .backends.cuda.backend import CudaBackend
from .config import ENGINE
from .device import Choice, choose_device
from .errors import ConfigError, ModelFileError
from .machine import memory_bytes
from .model.embedded import embedded_model
from .model.gguf_file import GgufFile, open_gguf
from .model.program import Program
from .model.source import Source, open_source
from .tokenizer import ChatTemplate, Tokenizer, build_tokenizer, read_chat_template

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Parts:
    """An open model file, its tokeniser and chat template (None where it has none), the backend that was chosen, and
    the context in tokens."""

    source: Source
    tokenizer: Tokenizer
    template: ChatTemplate | None
    choice: Choice
    n_ctx: int


def open_parts(
    path: str | os.PathLike[str] | None = None,
    device: str = "auto",
    threads: int | None = None,
    isa: str | None = None,
    n_ctx: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    n_gpu_layers: int | str | None = None,
) -> Parts:
    """Open a model; arguments and errors are those of ``load``."""
    choice = choose_device(device, threads, isa, n_gpu_layers)
    check_count("n_ctx", n_ctx, 0)
    if path is None:
        log.info("no model was named: the embedded one is used")
    source = open_source(path, progress)
    choice = choice.for_layers(source.n_layers)
    log.info("%s", choice.description)
    tokenizer = _tokenizer(source.file)
    if tokenizer.n_vocab != source.program.n_vocab:
        raise ModelFileError(
            f"{source.path}: the tokenizer has {tokenizer.n_vocab} tokens and the model {source.program.n_vocab}"
        )
    with _naming(source.file):
        template = read_chat_template(source.file.metadata, tokenizer.vocab)
    return Parts(source, tokenizer, template, choice, _context(n_ctx, source))


def room_bytes(choice: Choice, program: Program) -> int:
    """Free bytes for the states and pages of sequences, beside the program's weights: on the GPU if that runs it, else
    of the host. Where it is split: so many on both together that neither gets more than it has."""
    whole, rooms = program.state, []
    for backend, part in choice.parts(program):
        free = backend.free_bytes() if isinstance(backend, CudaBackend) else memory_bytes()[1]
        weights = {id(w): w.nbytes for op in part.ops for w in op.weights}
        left = max(0, free - sum(weights.values()))
        sizes = (part.state.state_bytes(), whole.state_bytes()), (part.state.page_bytes(1, 2), whole.page_bytes(1, 2))
        share = max(own / of if of else 0.0 for own, of in sizes)  # of a slot or a page that lies here
        rooms.append(int(left / share) if share else left)
    return min(rooms)


def check_count(name: str, value: object, low: int) -> None:
    """Raise ConfigError unless a setting is None or a whole number of at least ``low``."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
        raise ConfigError(f"{name} is {value!r}; a whole number of at least {low} is needed")


def open_tokenizer(path: str | os.PathLike[str] | None = None) -> Tokenizer:
    """The tokeniser of a model file (None: the embedded model) without its weights."""
    with open_gguf(embedded_model() if path is None else path) as file:
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

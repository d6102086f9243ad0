"""POST /tokenize and /detokenize, each in the two shapes that public servers have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
from quart import Response

from ..errors import RequestError
from ..tokenizer import Tokenizer
from . import chat
from .answer import Json
from .body import Body, Fields, read_body, read_object
from .fields import named_as_sent
from .incoming import note_ignored, read_request
from .model import Loaded
from .plans import tokenizing
from .record import Record
from .service import Service
from .settings import ServerSettings
from .stream import json_response


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """``content`` (llama-server) or ``prompt`` (vLLM), each with its own options."""

    content: str | list[str | int] | None = None
    add_special: bool | None = None
    parse_special: bool = True
    with_pieces: bool | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    model: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of /detokenize."""

    tokens: list[int] | None = None
    model: str | None = None


_OF_CONTENT = ("add_special", "with_pieces")
_OF_PROMPT = ("add_special_tokens", "return_token_strs")
_FIELDS = Fields()


class ChatTokenize:
    """A conversation to be tokenised as /v1/chat/completions would."""

    def __init__(self, raw: bytes, settings: ServerSettings) -> None:
        given = read_object(raw, settings.max_json_depth)
        own = {name: given.pop(name) for name in ("add_special_tokens", "return_token_strs") if name in given}
        # The template writes what belongs in front: add_special_tokens changes nothing here.
        self.strings = read_body(msgspec.json.encode(own), TokenizeRequest, _FIELDS).value.return_token_strs is True
        for name in ("content", "prompt"):
            if given.pop(name, None) is not None:
                raise RequestError(f"messages and {name} exclude each other", name)
        self.chat = chat.parse(msgspec.json.encode(given), settings)


def parse(raw: bytes, settings: ServerSettings) -> Body[TokenizeRequest] | ChatTokenize:
    """Which shape it is. Raises RequestError for none and for both at once."""
    given = read_object(raw, settings.max_json_depth)
    if given.get("messages") is not None:
        return ChatTokenize(raw, settings)
    given.pop("messages", None)
    body = read_body(msgspec.json.encode(given), TokenizeRequest, _FIELDS, strict=settings.strict_fields)
    value = body.value
    if value.content is None and value.prompt is None:
        raise RequestError("content, prompt or messages is needed", "content")
    if value.content is not None and value.prompt is not None:
        raise RequestError("content and prompt are two shapes of this request; one is needed", "prompt")
    for name in _OF_PROMPT if value.prompt is None else _OF_CONTENT:
        if getattr(value, name) is not None:
            there = "prompt" if value.prompt is None else "content"
            raise RequestError(f"{name} belongs to a request with {there}", name)
    return body


async def tokenize(service: Service, record: Record) -> Response:
    """POST /tokenize."""
    body = await read_request(service, parse)
    if isinstance(body, ChatTokenize):
        note_ignored(record, body.chat.ignored)
        model = service.find_model(body.chat.body.value.model, record)
        prompt = await service.off_loop(partial(chat.render, body.chat, model, service.settings), record.body_bytes)
        return json_response(_counted(model, list(prompt.ids), body.strings))
    note_ignored(record, body.ignored)
    model = service.find_model(body.value.model, record)
    return json_response(await service.off_loop(partial(_tokenize, model, body.value), record.body_bytes))


def _tokenize(model: Loaded, asked: TokenizeRequest) -> Json:
    tokenizer, special = model.tokenizer, asked.parse_special
    if asked.content is None:
        assert asked.prompt is not None
        ids = _encode(tokenizer, [asked.prompt], special, asked.add_special_tokens is not False, "prompt")
        return _counted(model, ids, asked.return_token_strs is True)
    parts = [asked.content] if isinstance(asked.content, str) else asked.content
    ids = _encode(tokenizer, parts, special, asked.add_special is True, "content")
    if asked.with_pieces:
        return {"tokens": [{"id": i, "piece": _piece(tokenizer.token_bytes(i))} for i in ids]}
    return {"tokens": ids}


def _encode(tokenizer: Tokenizer, parts: Sequence[str | int], special: bool, start: bool, param: str) -> list[int]:
    """Ids of texts and ids in a row. ``start``: with the token in front that the file asks for, if any."""
    vocab = tokenizer.vocab
    ids = [vocab.bos] if start and vocab.add_bos and vocab.bos is not None else []
    for at, part in enumerate(parts):
        if isinstance(part, int):
            _check_id(part, tokenizer.n_vocab, f"{param}[{at}]")
            ids.append(part)
            continue
        with named_as_sent({"prompt": param}), tokenizing("text"):
            ids += tokenizer.encode(part, special=special)
    return ids


def _counted(model: Loaded, ids: list[int], strings: bool) -> Json:
    tokens = model.tokenizer.vocab.tokens
    return {
        "count": len(ids),
        "max_model_len": model.facts.n_ctx,
        "tokens": ids,
        "token_strs": [tokens[i] for i in ids] if strings else None,
    }


def _piece(data: bytes) -> str | list[int]:
    """A text if it is one, else its bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(service: Service, record: Record) -> Response:
    """POST /detokenize."""

    def read(raw: bytes, settings: ServerSettings) -> Body[DetokenizeRequest]:
        return read_body(
            raw, DetokenizeRequest, _FIELDS, max_depth=settings.max_json_depth, strict=settings.strict_fields
        )

    body = await read_request(service, read)
    note_ignored(record, body.ignored)
    if body.value.tokens is None:
        raise RequestError("tokens must be a list of token ids", "tokens")
    model = service.find_model(body.value.model, record)
    text = await service.off_loop(partial(_detokenize, model.tokenizer, body.value.tokens), record.body_bytes)
    return json_response({"content": text, "prompt": text})


def _detokenize(tokenizer: Tokenizer, ids: list[int]) -> str:
    for at, token in enumerate(ids):
        _check_id(token, tokenizer.n_vocab, f"tokens[{at}]")
    return tokenizer.decode(ids, skip_special=False)


def _check_id(token: int, n_vocab: int, where: str) -> None:
    if not 0 <= token < n_vocab:
        raise RequestError(f"{where} is no token id: 0 to {n_vocab - 1} are", where)

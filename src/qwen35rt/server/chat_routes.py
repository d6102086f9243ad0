"""The three routes that take a chat body: an answer, the number of its prompt's tokens, the prompt's text."""

from __future__ import annotations

from functools import partial

from quart import Response

from . import chat
from .incoming import note_ignored, read_request
from .prompt import ChatPrompt
from .record import Record
from .service import Service
from .stream import json_response


async def post_chat_completions(service: Service, record: Record) -> Response:
    """POST /v1/chat/completions."""
    body = await _read(service, record)
    model = service.check_model(body.body.value.model, record)
    return await service.run(record, model, partial(chat.build, body, model, service.settings, record))


async def post_input_tokens(service: Service, record: Record) -> Response:
    """POST /v1/chat/completions/input_tokens."""
    prompt = await _render(service, record)
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


async def post_apply_template(service: Service, record: Record) -> Response:
    """POST /apply-template."""
    prompt = await _render(service, record)
    return json_response({"prompt": prompt.text})


async def _read(service: Service, record: Record) -> chat.ChatBody:
    body = await read_request(service, chat.parse)
    note_ignored(record, body.ignored)
    return body


async def _render(service: Service, record: Record) -> ChatPrompt:
    body = await _read(service, record)
    model = service.find_model(body.body.value.model, record)  # no engine is needed
    return await service.off_loop(partial(chat.render, body, model, service.settings), record.body_bytes)

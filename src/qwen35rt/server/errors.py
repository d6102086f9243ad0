"""One table: exception -> status, type and code of the answer. Owns the form of every error that leaves the server.

Codes are part of the interface. Nothing of a stack, a path or a body is ever shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound, RequestEntityTooLarge, RequestTimeout

from ..config import SERVER_LIMITS
from ..errors import (
    BackendError,
    Cancelled,
    ContextLengthExceeded,
    EngineLoading,
    EngineRestarting,
    EngineStopped,
    GenerationFailed,
    OutOfMemory,
    QueueFull,
    Qwen35Error,
    RequestError,
    TemplateError,
)


class InvalidJson(RequestError):
    """The body is not one JSON object."""


class UnsupportedParameter(RequestError):
    """A known field holds a value that this server does not honour yet (C7)."""


class UnknownParameter(RequestError):
    """A field that nothing knows, with --strict-fields (C8)."""


class EmptyPrompt(RequestError):
    """A prompt without tokens (C16)."""


class UnsupportedContent(RequestError):
    """A part of a message that the model cannot take (B82)."""


class NoChatTemplate(TemplateError):
    """The model has no chat template (B44)."""


class InvalidApiKey(RequestError):
    """The key is missing or wrong: the same answer."""


class HostNotAllowed(RequestError):
    """The Host header is not one of this server's names."""


class OriginNotAllowed(RequestError):
    """A page of another origin asks."""


class RouteNotFound(RequestError):
    """No such path."""


class ModelNotFound(RequestError):
    """No such model (C12)."""


class WrongMethod(RequestError):
    """The path exists, the method does not. ``allowed``: methods that do."""

    def __init__(self, allowed: str) -> None:
        super().__init__(f"this route takes {allowed}")
        self.allowed = allowed


class BodyTimedOut(RequestError):
    """The body did not come in time."""


class RequestTooLarge(RequestError):
    """The body is beyond its limit."""


class HeadersTooLarge(RequestError):
    """The header is beyond its limits."""


class UnsupportedMedia(RequestError):
    """Not JSON, or encoded."""


class NotBuiltYet(RequestError):
    """A route of a later release."""


class TokenizerFailed(RequestError):
    """The tokeniser broke on a text (C16)."""


class RequestTimedOut(RequestError):
    """The request took longer than --request-timeout."""


class NoSlotFree(QueueFull):
    """All slots have work (GET /slots?fail_on_no_slot=1)."""


class NoModel(Qwen35Error):
    """There is no model."""


class Row(NamedTuple):
    """``text``: said in place of the exception's own words where those are not meant for clients."""

    status: int
    type: str
    code: str
    text: str | None = None


_INVALID, _UNAVAILABLE = "invalid_request_error", "unavailable_error"
_INTERNAL = Row(500, "server_error", "internal_error", "the server failed on this request")
_RESTARTING = Row(503, _UNAVAILABLE, "engine_restarting", "the engine failed and is being restarted")
_DRAINING = Row(503, _UNAVAILABLE, "shutting_down", "the server is shutting down")

# The first class of an exception's own order of resolution that stands here decides.
TABLE: Mapping[type[BaseException], Row] = {
    RequestError: Row(400, _INVALID, "invalid_value"),
    InvalidJson: Row(400, _INVALID, "invalid_json"),
    UnsupportedParameter: Row(400, _INVALID, "unsupported_parameter"),
    UnknownParameter: Row(400, _INVALID, "unknown_parameter"),
    EmptyPrompt: Row(400, _INVALID, "empty_prompt"),
    UnsupportedContent: Row(400, _INVALID, "unsupported_content_type"),
    TemplateError: Row(400, _INVALID, "template_error"),
    NoChatTemplate: Row(400, _INVALID, "no_chat_template"),
    ContextLengthExceeded: Row(400, "exceed_context_size_error", "context_length_exceeded"),
    InvalidApiKey: Row(401, "authentication_error", "invalid_api_key"),
    HostNotAllowed: Row(403, "permission_error", "host_not_allowed"),
    OriginNotAllowed: Row(403, "permission_error", "origin_not_allowed"),
    RouteNotFound: Row(404, "not_found_error", "route_not_found"),
    ModelNotFound: Row(404, "not_found_error", "model_not_found"),
    WrongMethod: Row(405, _INVALID, "method_not_allowed"),
    BodyTimedOut: Row(408, "timeout_error", "body_timeout"),
    RequestTooLarge: Row(413, _INVALID, "request_too_large"),
    UnsupportedMedia: Row(415, _INVALID, "unsupported_media_type"),
    HeadersTooLarge: Row(431, _INVALID, "request_too_large"),
    GenerationFailed: Row(500, "server_error", "generation_failed"),
    TokenizerFailed: Row(500, "server_error", "tokenizer_error"),
    NotBuiltYet: Row(501, "not_supported_error", "not_implemented"),
    EngineLoading: Row(503, _UNAVAILABLE, "model_loading", "the model is being loaded"),
    NoModel: Row(503, _UNAVAILABLE, "no_model", "no model is loaded"),
    EngineStopped: _DRAINING,
    Cancelled: _DRAINING,  # seen by a client only where the server itself withdrew its turn
    BackendError: _RESTARTING,
    EngineRestarting: _RESTARTING,
    QueueFull: Row(503, "overloaded_error", "queue_full", "the queue is full"),
    NoSlotFree: Row(503, "overloaded_error", "queue_full", "no slot is free"),
    OutOfMemory: Row(503, "overloaded_error", "out_of_memory", "memory for this request could not be had"),
    RequestTimedOut: Row(504, "timeout_error", "request_timeout"),
    Exception: _INTERNAL,
}
_NO_RETRY = (500, 501, 504)  # public SDKs repeat these by themselves otherwise


@dataclass(frozen=True)
class Described:
    """An error as clients see it: ``error`` is the object of that name."""

    status: int
    error: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def row_of(error: BaseException) -> Row:
    """The table's row for an exception."""
    return next((TABLE[c] for c in type(error).__mro__ if c in TABLE), _INTERNAL)


def describe(error: BaseException, request_id: str, retry_after: int = 1) -> Described:
    """Status, error object and headers. ``retry_after``: seconds, used where the error passes by itself."""
    if isinstance(error, HTTPException):
        error = _from_http(error)
    row = row_of(error)
    message = row.text or str(error)
    if row.status >= 500:
        message += f" (request {request_id})"
    fields: dict[str, Any] = {
        "message": _cut(message),
        "type": row.type,
        "param": error.param if isinstance(error, RequestError) else None,
        "code": row.code,
    }
    headers = {}
    if isinstance(error, ContextLengthExceeded):
        fields |= {"n_prompt_tokens": error.n_prompt_tokens, "n_ctx": error.n_ctx}
    if isinstance(error, WrongMethod):
        headers["Allow"] = error.allowed
    if row.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if row.status == 503:
        headers["Retry-After"] = str(max(1, min(retry_after, SERVER_LIMITS.max_retry_after)))
    if row.status in _NO_RETRY:
        headers["x-should-retry"] = "false"
    return Described(row.status, fields, headers)


def _from_http(error: HTTPException) -> Qwen35Error | HTTPException:
    """What the framework raises, as one of ours."""
    if isinstance(error, NotFound):
        return RouteNotFound("there is no such route")
    if isinstance(error, MethodNotAllowed):
        return WrongMethod(", ".join(sorted(set(error.valid_methods or ()) - {"OPTIONS"})))
    if isinstance(error, RequestEntityTooLarge):
        return RequestTooLarge("the body is too large")
    if isinstance(error, RequestTimeout):
        return BodyTimedOut("the body did not come in time")
    return error if (error.code or 500) >= 500 else RequestError("the request is malformed")


def _cut(message: str) -> str:
    raw = message.encode("utf-8", "replace")
    limit = SERVER_LIMITS.error_bytes
    return message if len(raw) <= limit else raw[: limit - 3].decode("utf-8", "ignore") + "..."

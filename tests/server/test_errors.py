"""The table of errors, against the classes that there are and against the interface's own list."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest
from werkzeug.exceptions import HTTPException, InternalServerError, RequestURITooLarge, default_exceptions

import qwen35rt.server
from qwen35rt.errors import ContextLengthExceeded, Qwen35Error, RequestError
from qwen35rt.server.errors import TABLE, WrongMethod, describe, row_of

CODES = {
    400: {
        *("invalid_json", "invalid_value", "unsupported_parameter", "unknown_parameter", "empty_prompt"),
        *("unsupported_content_type", "template_error", "no_chat_template", "context_length_exceeded"),
    },
    401: {"invalid_api_key"},
    403: {"host_not_allowed", "origin_not_allowed"},
    404: {"route_not_found", "model_not_found"},
    405: {"method_not_allowed"},
    408: {"body_timeout"},
    413: {"request_too_large"},
    415: {"unsupported_media_type"},
    431: {"request_too_large"},
    500: {"generation_failed", "tokenizer_error", "internal_error"},
    501: {"not_implemented"},
    503: {"model_loading", "no_model", "shutting_down", "engine_restarting", "queue_full", "out_of_memory"},
    504: {"request_timeout"},
}
INTERNAL = ("Qwen35Error", "ConfigError", "ModelFileError", "UnsupportedModel")  # no request can cause them


def classes(base: type[BaseException] = Qwen35Error) -> Iterator[type[BaseException]]:
    for module in pkgutil.iter_modules(qwen35rt.server.__path__):
        importlib.import_module(f"qwen35rt.server.{module.name}")
    yield base
    for child in base.__subclasses__():
        yield from classes(child)


def test_every_exception_class_has_its_row() -> None:
    found = {c for c in classes() if c.__module__.startswith("qwen35rt")}
    assert len(found) > 30
    for kind in found:
        error = kind.__new__(kind)
        row = row_of(error)
        assert (row.code == "internal_error") == (kind.__name__ in INTERNAL), kind
        assert row.code in CODES[row.status], kind
    assert {c for c in TABLE if c not in found} == {Exception}


def test_the_table_is_the_interface() -> None:
    codes: dict[int, set[str]] = {}
    for row in TABLE.values():
        codes.setdefault(row.status, set()).add(row.code)
    assert codes == CODES


def test_headers_tell_clients_whether_to_come_again() -> None:
    for kind in TABLE:
        error = kind.__new__(kind)
        if isinstance(error, ContextLengthExceeded):
            error = ContextLengthExceeded(9, 8)
        elif isinstance(error, WrongMethod):
            error = WrongMethod("GET")
        elif isinstance(error, RequestError):
            error = kind("x")
        told = describe(error, "r1", 500)
        assert set(told.error) >= {"message", "type", "param", "code"}
        assert told.headers.get("Retry-After") == ("120" if told.status == 503 else None)
        assert told.headers.get("x-should-retry") == ("false" if told.status in (500, 501, 504) else None)
        assert ("WWW-Authenticate" in told.headers) == (told.status == 401)
        assert ("Allow" in told.headers) == (told.status == 405)
        assert ("r1" in told.error["message"]) == (told.status >= 500)


def test_c59_messages_are_short_and_whole_characters() -> None:
    told = describe(RequestError("é" * 5000, "prompt"), "r1")
    assert len(told.error["message"].encode()) <= 2048
    assert told.error["message"].endswith("é...")
    assert told.error["param"] == "prompt"


@pytest.mark.parametrize("kind", sorted(set(default_exceptions.values()), key=str))
def test_what_the_framework_raises_is_told_in_our_form(kind: type[HTTPException]) -> None:
    told = describe(kind(), "r1")
    assert told.status in CODES
    assert told.error["code"] in CODES[told.status]
    assert "<" not in told.error["message"]


def test_other_client_faults_of_the_framework_are_400() -> None:
    assert describe(RequestURITooLarge(), "r").status == 400
    assert describe(InternalServerError(), "r").error["code"] == "internal_error"
    assert describe(KeyError("secret"), "r").error["message"] == "the server failed on this request (request r)"

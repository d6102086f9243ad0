"""The Quart application: the table of routes, the checks before a body is read, the form of errors.

``create_app`` gives an ordinary Quart application that can be mounted elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from quart import Quart, Response, request
from quart.wrappers.base import BaseRequestWebsocket
from werkzeug.routing import MapAdapter

from . import chat_routes, completions, health, models, page, state, text
from .answer import Json
from .errors import NotBuiltYet, describe
from .incoming import BODIES, Bodies, note_ignored, read_request, record_of
from .record import KEY, Record, Recorder
from .routes import STAGE_2, STAGE_3
from .service import Service
from .stream import json_response

log = logging.getLogger(__name__)

Handler = Callable[..., Awaitable[Response]]  # of the service, the request's record and the arguments of the path


@dataclass(frozen=True)
class Route:
    """``handler`` None: announced for a later release, 501. ``key``: whether one is needed where keys are set."""

    path: str
    methods: tuple[str, ...]
    handler: Handler | None = None
    key: bool = True
    open: bool = False  # taken from pages of any origin too


async def post_completions(service: Service, record: Record) -> Response:
    """POST /v1/completions."""
    body = await read_request(service, completions.parse)
    note_ignored(record, body.ignored)
    model = service.check_model(body.value.model, record)
    return await service.run(record, model, partial(completions.build, body, model, service.settings, record))


GET, POST = ("GET",), ("POST",)
ROUTES: tuple[Route, ...] = (
    Route("/v1/completions", POST, post_completions),
    Route("/v1/chat/completions", POST, chat_routes.post_chat_completions),
    Route("/v1/chat/completions/input_tokens", POST, chat_routes.post_input_tokens),
    Route("/apply-template", POST, chat_routes.post_apply_template),
    *(Route(path, GET, health.health, key=False, open=True) for path in ("/health", "/healthz", "/v1/health", "/ping")),
    Route("/livez", GET, health.livez, key=False, open=True),
    Route("/readyz", GET, health.health, key=False, open=True),
    Route("/metrics", GET, health.metrics),
    Route("/v1/models", GET, models.list_models),
    Route("/v1/models/<path:id>", GET, models.get_model),
    Route("/tokenize", POST, text.tokenize),
    Route("/detokenize", POST, text.detokenize),
    Route("/props", GET, state.props),
    Route("/slots", GET, state.slots),
    Route("/version", GET, state.version),
    Route("/load", GET, state.load),
    Route("/", GET, page.index, key=False),  # which looks for one itself
    *(Route(path, (method,)) for method, path in STAGE_2 + STAGE_3 if path != "/"),
)


class _Application(Quart):
    """Routes depend on method and path alone: a Host header that is no name cannot keep a request from its checks."""

    def create_url_adapter(self, request: BaseRequestWebsocket | None) -> MapAdapter | None:
        """What finds the route of a request."""
        if request is None:
            return None
        return self.url_map.bind("localhost", request.root_path, None, request.scheme, request.method, request.path)


def create_app(service: Service, routes: tuple[Route, ...] = ROUTES) -> Quart:
    """An application that serves ``service``; starting it starts loading the model."""
    app = _Application(__name__, static_folder=None)
    settings = service.settings
    app.config.update(
        MAX_CONTENT_LENGTH=settings.max_body,
        BODY_TIMEOUT=settings.body_timeout,
        RESPONSE_TIMEOUT=settings.write_timeout,
        PROVIDE_AUTOMATIC_OPTIONS=False,
        PROPAGATE_EXCEPTIONS=False,
    )
    app.url_map.merge_slashes = False
    table: dict[str, Route] = {}
    for route in routes:
        name = f"{'_'.join(route.methods)} {route.path}".replace(".", "_")
        table[name] = route
        app.add_url_rule(
            route.path,
            endpoint=name,
            view_func=partial(_serve, service, route),
            methods=list(route.methods),
            provide_automatic_options=False,
        )
    recorder = Recorder(app.asgi_app, service.metrics)  # type: ignore[arg-type]
    app.asgi_app = recorder  # type: ignore[method-assign, assignment]
    app.extensions["qwen35rt"] = recorder
    app.extensions[BODIES] = Bodies(settings)

    @app.before_request
    async def check() -> Response | None:
        record_of().task = asyncio.current_task()
        rule = request.url_rule
        return _check(service, recorder, table.get(rule.endpoint) if rule is not None else None)

    @app.errorhandler(Exception)
    async def failed(error: Exception) -> Response:
        return _error_response(service, error)

    @app.before_serving
    async def start() -> None:
        service.start()

    @app.after_serving
    async def stop() -> None:
        service.close()

    return app


async def _serve(service: Service, route: Route, **arguments: Any) -> Response:
    record = record_of()
    if route.handler is None:
        raise NotBuiltYet(f"{route.path} is not part of this release")
    return await route.handler(service, record, **arguments)


def _check(service: Service, recorder: Recorder, route: Route | None) -> Response | None:
    """Everything that can be refused before the body is read, in the order of C4."""
    guard, record = service.guard, record_of()
    guard.check_headers(request.scope["headers"])
    if route is not None:
        record.endpoint = route.path
    elif request.method != "OPTIONS" and request.routing_exception is not None:
        raise request.routing_exception
    guard.check_host(request.headers.get("Host", ""))
    if route is None or not route.open:
        cors = guard.check_origin(request.headers.get("Origin"))
        record.headers |= cors
        if (answer := guard.preflight(request, cors)) is not None:
            return answer
    if route is None:
        raise request.routing_exception or NotBuiltYet("this method is not served")
    if route.key:
        guard.check_key(request.headers)
    if request.method == "POST" and route.handler is not None:
        guard.check_body(request.headers)
    if route.key:
        guard.check_open(len(recorder.open))
    return None


def _error_response(service: Service, error: Exception) -> Response:
    record = cast(dict[str, Any], request.scope).get(KEY)
    request_id = record.id if isinstance(record, Record) else ""
    told = describe(error, request_id, service.retry_after(error))
    if told.status == 500:
        log.error("request %s failed", request_id, exc_info=error)
    service.refused(error)
    body: Json = {"error": told.error}
    response = json_response(body, told.status)
    response.headers.update(told.headers)
    return response

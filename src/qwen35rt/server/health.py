"""Health, metrics and load: answered from the event loop alone, whatever the engine does (B24)."""

from __future__ import annotations

import time

from quart import Response, request

from .. import __version__
from ..errors import EngineRestarting, Qwen35Error
from .answer import Json
from .errors import HostNotAllowed, describe
from .metrics import CONTENT_TYPE
from .record import Asgi, Message, Receive, Record, Send
from .service import Service
from .stream import json_response

_WORDS = {"ready": "ok"}


async def livez(service: Service, record: Record) -> Response:
    """The event loop runs."""
    record.quiet = True
    return json_response({"status": "ok"})


async def health(service: Service, record: Record) -> Response:
    """Whether requests can be taken, and for those with a key what runs here."""
    record.quiet = True
    state = service.state
    answer: Json = {"status": _WORDS.get(state, state)}
    headers = {}
    if state != "ready":
        told = describe(_reason(service), record.id)
        answer["error"] = told.error
        headers = told.headers
    if service.guard.has_key(request.headers):
        answer |= {"version": __version__, "uptime_s": round(time.monotonic() - service.started, 1)}
        answer["progress"] = round(service.progress, 3)
        if state in ("ready", "degraded"):
            facts = service.model.facts
            answer |= {"device": facts.device, "device_name": facts.device_name, "n_gpu_layers": facts.n_gpu_layers}
            answer |= {"reason": facts.reason, "model": facts.id}
        if state == "degraded":
            answer["fault"] = service.model.engine.snapshot().reason
    response = json_response(answer, 200 if state == "ready" else 503)
    response.headers.update(headers)
    return response


async def metrics(service: Service, record: Record) -> Response:
    """Prometheus text."""
    record.quiet = True
    return Response(service.metrics.text(), content_type=CONTENT_TYPE)


def _reason(service: Service) -> Exception:
    try:
        service.check_ready()
    except Qwen35Error as e:
        return e
    return EngineRestarting("the engine is being restarted")


def metrics_app(service: Service) -> Asgi:
    """ASGI application of --metrics-port: the page of metrics, without a key, and nothing else."""

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            status, text = _metrics_page(service, scope)
            kind = CONTENT_TYPE if status == 200 else "text/plain"
            headers = [(b"content-type", kind.encode()), (b"content-length", str(len(text)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": text})

    return app


def _metrics_page(service: Service, scope: Message) -> tuple[int, bytes]:
    host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    try:
        service.guard.check_host(host)
    except HostNotAllowed as e:
        return 403, str(e).encode()
    if scope["path"] != "/metrics":
        return 404, b"only /metrics is here"
    if scope["method"] not in ("GET", "HEAD"):
        return 405, b"only GET is taken"
    return 200, service.metrics.text()

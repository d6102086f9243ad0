"""GET / for people with a browser: what runs here and where to go on. The page needs nothing from elsewhere.

It needs no key, as a browser has none to send; whoever has none where one is needed is not told what runs.
"""

from __future__ import annotations

import re
from html import escape

from quart import Response, request

from .. import __version__
from .errors import NotBuiltYet
from .record import Record
from .service import Service, State

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:\d{1,5})?", re.ASCII)  # nothing that a shell reads
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    "X-Content-Type-Options": "nosniff",
}
_STATES: dict[State, str] = {
    "loading": "The model is being loaded.",
    "no_model": "No model is loaded.",
    "draining": "The server is shutting down.",
    "degraded": "The engine has failed and is being restarted.",
    "ready": "Ready.",
}
_ROUTES = (
    ("POST /v1/chat/completions", "the answer to a conversation"),
    ("POST /v1/completions", "the continuation of a text"),
    ("GET /v1/models", "the model and its context"),
    ("GET /health", "whether it works"),
    ("GET /props, /slots, /metrics", "how it is set up and what it does"),
)
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>qwen35rt</title>
<link rel="icon" href="data:,">
<style>body {{ font: 1rem/1.5 sans-serif; max-width: 45rem; margin: 2rem auto; padding: 0 1rem }}
td {{ padding-right: 1.5rem; vertical-align: top }} pre {{ overflow-x: auto }}</style>
</head>
<body>
<h1>qwen35rt</h1>
<p>{state} {model}</p>
<p>This server has no page to chat on. Programs ask it as they ask OpenAI's service, with the base address
<code>{base}/v1</code>:</p>
<pre>curl {base}/v1/chat/completions -H 'Content-Type: application/json' \\
  {key}-d '{{"messages": [{{"role": "user", "content": "Hello"}}]}}'</pre>
<table>
{rows}
</table>
<p>All routes, flags and errors are in <code>docs/server.md</code> of the project; <code>qwen35rt serve --help</code>
lists the flags, and <code>qwen35rt chat</code> is a chat in the terminal.</p>
</body>
</html>
"""


async def index(service: Service, record: Record) -> Response:
    """GET /. Raises NotBuiltYet where no page was asked for by its type, as by programs."""
    guard = service.guard
    if not any(kind.lower() == "text/html" and weight > 0 for kind, weight in request.accept_mimetypes):
        guard.check_key(request.headers)
        raise NotBuiltYet("/ has nothing for programs yet; they ask /v1/chat/completions or /v1/completions")
    known = guard.has_key(request.headers)
    model = ""
    if not known:
        model = "An API key is needed."
    elif service.state == "ready":
        facts = service.model.facts
        model = f"Model {facts.id}, context {facts.n_ctx}, device {facts.device}, version {__version__}."
    page = _PAGE.format(
        state=_STATES[service.state],
        model=escape(model),
        base=_base(service.settings.port),
        key="-H 'Authorization: Bearer KEY' \\\n  " if guard.needs_key else "",
        rows="\n".join(f"<tr><td><code>{route}</code></td><td>{use}</td></tr>" for route, use in _ROUTES),
    )
    return Response(page, headers=_HEADERS)


def _base(port: int) -> str:
    """The address at which the browser found this server, as far as it is one."""
    host = request.headers.get("Host", "")
    return f"{request.scheme}://{host if _HOST.fullmatch(host) else f'localhost:{port}'}"

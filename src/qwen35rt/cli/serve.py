"""``qwen35rt serve``: the HTTP server. Flags become settings; the server itself is in qwen35rt.server."""

from __future__ import annotations

import argparse
import logging
import logging.handlers
import socket
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from .parser import add_layers_argument, filled, real, whole

if TYPE_CHECKING:
    from ..server.service import Service
    from ..server.settings import ServerSettings

_SECONDS = real(0, 1e9)
_BYTES = whole(1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command. The name of each is also a variable, QWEN35RT_<FLAG>, and a key of --config."""
    parser.usage = "qwen35rt serve [MODEL] [flags]"
    parser.description = (
        "Serves a model over HTTP, with OpenAI's completions and chat completions. A flag --ctx-size can also be given "
        "as the variable QWEN35RT_CTX_SIZE or as ctx-size in the file that --config names; the flag wins, then the "
        "variable. Without a model the embedded one is served."
    )
    parser.add_argument("model_argument", nargs="?", type=filled, metavar="MODEL", help="GGUF file; the same as -m")
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings, named as the flags are")
    parser.add_argument("-v", "--verbose", action="store_true", help="more log lines, and where an error came from")
    for add in (_model, _engine, _address, _requests, _sampling, _chat, _times, _limits, _reports):
        add(parser)


def _model(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("model")
    g.add_argument(
        "-m", "--model", type=filled, metavar="PATH", help="GGUF file, any part of a split one, or a folder with one"
    )
    g.add_argument(
        "-hf",
        "--hf-repo",
        type=filled,
        metavar="USER/REPO[:QUANT]",
        help="download from Hugging Face, or use the copy",
    )
    g.add_argument("--hf-file", metavar="NAME", help="the file of the repository, in place of QUANT")
    g.add_argument("-a", "--alias", action="append", metavar="NAME", help="name of the model, instead of the file's")


def _engine(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("engine")
    g.add_argument("--device", choices=("auto", "cpu", "cuda", "reference"), help="where it runs (default: auto)")
    add_layers_argument(g)
    g.add_argument("-t", "--threads", type=whole(1, 1024), metavar="N", help="CPU threads (default: usable cores)")
    g.add_argument("--isa", metavar="LEVEL", help="CPU instruction level (default: the best)")
    g.add_argument(
        "-c", "--ctx-size", type=whole(0), metavar="N", help="context of a request; 0, default: the model's own"
    )
    g.add_argument("-np", "--parallel", type=whole(1, 4096), metavar="N", help="requests at once (default: 4)")
    g.add_argument("--queue", type=whole(0), metavar="N", help="waiting requests (default: 64, or 4 x parallel)")
    g.add_argument("-b", "--batch-size", type=whole(1, 65536), metavar="N", help="rows of a step (default: 512)")
    g.add_argument("--kv-dtype", choices=("f16", "f32"), help="type of keys and values (default: f16)")
    g.add_argument(
        "--cache-ram", type=whole(0), metavar="MIB", help="kept states; 0: none (default: a quarter of free memory)"
    )


def _address(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("address and access")
    g.add_argument("--host", metavar="ADDRESS", help="default: 127.0.0.1")
    g.add_argument("--port", type=whole(0, 65535), metavar="N", help="0: any free one (default: 8080)")
    g.add_argument("--metrics-port", type=whole(0, 65535), metavar="N", help="/metrics without a key, on its own port")
    g.add_argument("--api-key", action="append", metavar="KEY", help="a key that requests need; can be repeated")
    g.add_argument("--api-key-file", metavar="FILE", help="keys, one a line")
    g.add_argument("--allow-unauthenticated", action="store_true", default=None, help="no key on a public address")
    g.add_argument("--cors-origins", action="append", metavar="ORIGIN", help="pages that may ask, or *")
    g.add_argument("--allowed-hosts", action="append", metavar="NAME", help="names of this server in Host")
    g.add_argument("--ssl-cert-file", metavar="FILE", help="TLS certificate (PEM)")
    g.add_argument("--ssl-key-file", metavar="FILE", help="its key (PEM)")


def _requests(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("requests")
    g.add_argument("--strict-fields", action="store_true", default=None, help="refuse unknown fields")
    g.add_argument("--strict-model", action="store_true", default=None, help="refuse other models' names")
    g.add_argument(
        "-n", "--max-tokens-default", type=whole(0), metavar="N", help="tokens where a request names no limit"
    )


def _sampling(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("sampling where a request gives no value (default: the model file's, else ours)")
    g.add_argument("--temperature", "--temp", type=real(0, 2), metavar="X", help="0 is greedy")
    g.add_argument("--top-k", type=whole(-1), metavar="N", help="0 or -1: off")
    g.add_argument("--top-p", type=real(0, 1), metavar="X", help="1: off")
    g.add_argument("--min-p", type=real(0, 1), metavar="X", help="0: off")
    g.add_argument("--presence-penalty", type=real(-2, 2), metavar="X", help="0: off")
    g.add_argument("--frequency-penalty", type=real(-2, 2), metavar="X", help="0: off")
    g.add_argument("--repetition-penalty", "--repeat-penalty", type=real(1e-6, 10), metavar="X", help="1: off")
    g.add_argument("--repeat-last-n", type=whole(-1), metavar="N", help="tokens that it looks at, -1: all")
    g.add_argument(
        "--sampling-preset",
        choices=("general", "precise", "reasoning", "off"),
        help="recommended values of chats (default: general, for the embedded model off)",
    )


def _chat(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("chat")
    g.add_argument("--chat-template", metavar="TEXT", help="in place of the model's own")
    g.add_argument("--chat-template-file", metavar="FILE", help="the same, from a file")
    g.add_argument("--allow-request-template", action="store_true", default=None, help="requests may bring one")
    g.add_argument("--late-system", choices=("user", "merge", "error"), help="later system messages (default: user)")
    g.add_argument("--reasoning", choices=("on", "off", "auto"), help="auto, default: the template's way")
    g.add_argument("--reasoning-budget", type=whole(-1), metavar="N", help="tokens of reasoning, -1: no bound")
    g.add_argument("--reasoning-budget-message", metavar="TEXT", help="said where it is spent")
    g.add_argument(
        "--reasoning-field",
        choices=("both", "reasoning_content", "reasoning", "none"),
        help="its name in answers (default: both)",
    )


def _times(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("times in seconds")
    g.add_argument("--request-timeout", type=_SECONDS, metavar="S", help="of a whole request (default: 3600)")
    g.add_argument("--write-timeout", type=_SECONDS, metavar="S", help="a client that does not read (default: 60)")
    g.add_argument("--body-timeout", type=_SECONDS, metavar="S", help="a body that does not come (default: 60)")
    g.add_argument("--shutdown-timeout", type=_SECONDS, metavar="S", help="for requests at the end (default: 30)")
    g.add_argument("--sse-ping", type=_SECONDS, metavar="S", help="comment in a silent stream; 0: off (default: 15)")
    g.add_argument("--first-event", type=_SECONDS, metavar="S", help="before a stream's status line (default: 15)")
    g.add_argument("--keep-alive", type=_SECONDS, metavar="S", help="idle connection, slow header (default: 5)")


def _limits(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("limits of one request or client")
    for name, text in (
        ("max-body", "bytes of a body (default: 32 MiB)"),
        ("max-header", "bytes of a header (default: 16 KiB)"),
        ("max-headers", "fields of a header (default: 100)"),
        ("max-json-depth", "levels of JSON (default: 64)"),
        ("max-messages", "messages of a chat (default: 4096)"),
        ("max-tools", "tools of a chat (default: 128)"),
        ("max-prompts", "prompts of a completion (default: 1024)"),
        ("max-stops", "stop strings of a request (default: 16)"),
        ("max-stop-token-ids", "stop token ids of a request (default: 128)"),
        ("max-logit-bias", "entries of logit_bias (default: 1024)"),
        ("max-logprobs", "best tokens told of each position (default: 20)"),
        ("max-open", "requests open at once (default: 4096)"),
        ("max-stream-buffer", "bytes of a stream that its client has not read (default: 256 KiB)"),
    ):
        g.add_argument(f"--{name}", type=_BYTES, metavar="N", help=text)


def _reports(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("reports")
    g.add_argument("--no-slots", action="store_true", default=None, help="turn /slots off")
    g.add_argument("--metrics-compat", action="append", metavar="NAME", help="also vllm's or llamacpp's series")
    g.add_argument("--log-jsonl", metavar="FILE", help="one JSON object for each finished request")


def settings_of(args: argparse.Namespace) -> ServerSettings:
    """Flags, variables and config file together. Raises ConfigError."""
    from ..errors import ConfigError
    from ..server.settings import read_settings

    if args.api_key is not None and not "".join(args.api_key).strip(", "):
        raise ConfigError("--api-key is empty; give a key, or leave it out")
    flags: dict[str, Any] = {
        name: ",".join(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if name not in ("model_argument", "config", "verbose")
    }
    if args.model_argument is not None:
        if args.model is not None:
            raise ConfigError("the model is named twice; give MODEL or -m")
        flags["model"] = args.model_argument
    if args.model_argument is not None or args.model is not None or args.hf_repo is not None:
        # A model that a flag names replaces whatever variables and file name.
        flags = {"hf_repo": "", "hf_file": "", "model": ""} | {k: v for k, v in flags.items() if v is not None}
    return read_settings(flags, args.config)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from ..errors import ConfigError
    from ..server.settings import is_loopback
    from .console import note

    settings = settings_of(args)
    if settings.model and settings.hf_repo:
        raise ConfigError("--model and --hf-repo name two models; give one")
    if settings.hf_file and not settings.hf_repo:
        raise ConfigError("--hf-file needs --hf-repo USER/REPO")
    keys = settings.keys()
    logs = _start_logging(settings.log_jsonl, args.verbose)
    try:
        with ExitStack() as sockets:
            ports = (settings.port,) if settings.metrics_port is None else (settings.port, settings.metrics_port)
            listeners = [sockets.enter_context(_listen(settings.host, port)) for port in ports]
            if not is_loopback(settings.host) and not keys:
                note(f"warning: whoever can reach {settings.host} can use this server: no API key is set")
            if not settings.model and not settings.hf_repo:
                note("no model was named: serving the embedded one, which knows this package only")
            from ..server.run import run

            return run(settings, lambda: _service(settings), listeners[0], note, *listeners[1:])
    finally:
        logs.stop()


def _listen(host: str, port: int) -> socket.socket:
    from ..server.listen import listen

    return listen(host, port)


def _service(settings: ServerSettings) -> Service:
    from ..server.loading import make_service

    return make_service(settings, lambda: _path(settings))


def _path(settings: ServerSettings) -> str | None:
    if not settings.hf_repo:
        return settings.model or None
    from .hub import fetch

    return str(fetch(settings.hf_repo, settings.hf_file or None))


class _Requests(logging.Filter):
    """The lines of finished requests, as JSON."""

    def filter(self, record: logging.LogRecord) -> bool:
        return hasattr(record, "request") and record.levelno >= logging.INFO


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        import json

        return json.dumps({"time": round(record.created, 3)} | record.__dict__["request"], ensure_ascii=False)


class _RequestFile(logging.handlers.WatchedFileHandler):
    """A line that cannot be written is lost with a warning, of several in a row the first; serving goes on."""

    _error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        before, self._error = self._error, None
        try:
            super().emit(record)
        except OSError as e:  # the file was moved away, and there can be no new one
            self._error = e
        if self._error is not None and before is None:
            logging.getLogger("qwen35rt.server").warning(
                "requests are not logged to %s: %s", self.baseFilename, self._error
            )

    def handleError(self, record: logging.LogRecord) -> None:  # the name is that of logging
        self._error = sys.exc_info()[1]


class _Queue(logging.handlers.QueueHandler):
    """Hands lines over as they are; the event loop never waits for a terminal or a disk."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record


def _start_logging(jsonl: str | None, verbose: bool) -> logging.handlers.QueueListener:
    """Log lines of the server from INFO on, others from WARNING on, to standard error; requests to ``jsonl`` too."""
    import queue

    from ..errors import ConfigError

    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [stream]
    if jsonl is not None:
        try:
            file = _RequestFile(jsonl, encoding="utf-8")
        except OSError as e:
            raise ConfigError(f"--log-jsonl {jsonl}: {e.strerror}") from None
        file.addFilter(_Requests())
        file.setFormatter(_Json())
        handlers.append(file)
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    root = logging.getLogger("qwen35rt")
    root.handlers[:] = [_Queue(lines)]
    root.setLevel(logging.DEBUG if verbose else logging.WARNING)
    logging.getLogger("qwen35rt.server").setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("qwen35rt.server.hypercorn").setLevel(logging.WARNING)
    listener = logging.handlers.QueueListener(lines, *handlers)
    listener.start()
    return listener

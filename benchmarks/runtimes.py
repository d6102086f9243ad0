"""One runtime in one process: the project's own, or its peer llama.cpp (the xllamacpp wheel) behind its HTTP server.

Run as a script it is that process: a request a line on standard input, a result a line on standard output.
``Runtime`` is the handle that compare.py holds. Knows nothing of tables and repeats.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("qwen35rt", "llama.cpp")
PREPARED = "ready"

# (prompt ids or text, tokens to draw) -> (prompt tokens, milliseconds, decode steps, milliseconds)
Run = Callable[[Any, int], tuple[int, float, int, float]]


class Runtime:
    """A child process with one model loaded. It sleeps between requests."""

    def __init__(self, name: str, path: Path, threads: int, n_ctx: int, cold: bool = False) -> None:
        self.name, self.path, self.threads = name, path, threads
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        arguments = [name, str(path), str(threads), str(n_ctx), "cold" if cold else "warm"]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=source_environment(),
            text=True,
        )

    def read(self) -> Any:
        """The next line of the child. Raises RuntimeError with the end of its log if it has died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"{self.name} on {self.path}: {self.log.read().decode(errors='replace')[-2000:]}")
        return json.loads(line)

    def wait_ready(self) -> None:
        """Until the model is loaded."""
        if self.read() != PREPARED:
            raise RuntimeError(f"{self.name}: an unexpected answer")

    def ask(self, prompt: list[int] | str, draw: int) -> Any:
        """Run a prompt and draw tokens: [prompt tokens, ms, decode steps, ms], or in a cold run the clock."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([prompt, draw]) + "\n")
        self.process.stdin.flush()
        return self.read()

    def anonymous_bytes(self) -> int:
        """Resident memory that is not a file's pages."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no RssAnon in /proc/PID/status")

    def close(self) -> None:
        """End the child."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()


def source_environment() -> dict[str, str]:
    """The environment of a child that imports the package from this checkout."""
    source = str(Path(__file__).resolve().parents[1] / "src")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))}
    # Compiled modules are kept, as those of an installed package are.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def open_own(path: str, threads: int, n_ctx: int) -> Run:
    """The project's Python interface."""
    import qwen35rt

    model = qwen35rt.load(path, device="cpu", threads=threads, n_ctx=n_ctx)

    def run(prompt: Any, draw: int) -> tuple[int, float, int, float]:
        t = model.generate(
            prompt, max_tokens=draw, temperature=0.0, ignore_eos=True, cache_prompt=False, parse_special=False
        ).timings
        return t.prompt_n, t.prompt_ms or 0.0, t.predicted_n - 1, t.predicted_ms or 0.0

    return run


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses now."""
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def peer_server(path: str, threads: int, n_ctx: int, slots: int, port: int, warmup: bool = True) -> Any:
    """llama.cpp's server in this process, which listens on ``port`` until the object is dropped."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.port, params.warmup = n_ctx, slots, port, warmup
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def open_peer(path: str, threads: int, n_ctx: int, warmup: bool) -> Run:
    """llama.cpp's server in this process, asked over loopback; the times are its own."""
    import http.client

    port = free_port()
    server = peer_server(path, threads, n_ctx, 1, port, warmup)

    def run(prompt: Any, draw: int) -> tuple[int, float, int, float]:
        assert server is not None  # keeps it alive
        fixed = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
        connection.request("POST", "/completion", json.dumps({"prompt": prompt, "n_predict": draw, **fixed}))
        answer = json.loads(connection.getresponse().read())
        connection.close()
        if "timings" not in answer:
            raise RuntimeError(str(answer))
        t = answer["timings"]
        # The first token comes out of the prompt: one step less than tokens.
        return t["prompt_n"], t["prompt_ms"], t["predicted_n"] - 1, t["predicted_ms"]

    return run


def peer_version() -> str:
    """The version of the wheel."""
    from importlib.metadata import version

    return f"xllamacpp {version('xllamacpp')}"


def main() -> None:
    """The child."""
    name, path, threads, n_ctx, mode = sys.argv[1:]
    cold = mode == "cold"
    # What the libraries print must not get between the results.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if name == NAMES[0]:
        run = open_own(path, int(threads), int(n_ctx))
    else:
        run = open_peer(path, int(threads), int(n_ctx), warmup=not cold)
    if not cold:
        print(json.dumps(PREPARED), file=out, flush=True)
    for line in sys.stdin:
        result: Any = run(*json.loads(line))
        print(json.dumps(time.monotonic() if cold else result), file=out, flush=True)
    os._exit(0)  # the peer's server takes seconds to stop


if __name__ == "__main__":
    main()

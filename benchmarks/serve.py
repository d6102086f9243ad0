"""Measures servers over HTTP: this project's, and llama.cpp's beside it, in turns on the same GGUF file.

    python benchmarks/serve.py -m a.gguf -t 2 --clients 1 --clients 8
    python benchmarks/serve.py -m a.gguf -t 2 --kept 2048

``--clients N``: completion tokens per second of N clients together. ``--kept N``: what keeping states costs a prompt of
N tokens that nobody has asked before, and what they save the next one. Both take some two minutes on two cores with a
0.8B model; a slower machine makes fewer repetitions, see ``--seconds``. What is measured is told as it comes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtimes import NAMES, free_port, peer_server, source_environment

FIRST_IDS = 1_000  # from here on ordinary tokens of the vocabulary
SLOTS = 8
READY_SECONDS = 300


class Server:
    """One server in its own process. ``flags``: further flags of ``qwen35rt serve``."""

    def __init__(self, name: str, path: Path, threads: int, n_ctx: int, flags: tuple[str, ...] = ()) -> None:
        self.port = free_port()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        own = ["-m", "qwen35rt", "serve", str(path), "--port", str(self.port), "--threads", str(threads)]
        own += ["--ctx-size", str(n_ctx), "--parallel", str(SLOTS), "--device", "cpu", *flags]
        peer = [__file__, "--peer", str(path), str(threads), str(n_ctx * SLOTS), str(self.port)]
        self.process = subprocess.Popen(
            [sys.executable, *(own if name == NAMES[0] else peer)],
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=self.log,
            env=source_environment(),
        )
        until = time.monotonic() + READY_SECONDS
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > until:
                self.log.seek(0)
                raise RuntimeError(f"{name} did not start: {self.log.read().decode(errors='replace')[-2000:]}")
            time.sleep(0.2)

    def _ready(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def complete(self, ids: list[int], n: int) -> dict[str, Any]:
        """The answer of /v1/completions with exactly ``n`` tokens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=3600)
        body = {"prompt": ids, "max_tokens": n, "temperature": 0, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        if answer.get("usage", {}).get("completion_tokens") != n:
            raise RuntimeError(f"{n} tokens were asked for: {str(answer)[:500]}")
        return dict(answer)

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def together(server: Server, prompts: list[list[int]], n: int) -> float:
    """Completion tokens per second of clients that ask at once, one for each prompt."""
    failed: list[BaseException] = []

    def ask(ids: list[int]) -> None:
        try:
            server.complete(ids, n)
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=ask, args=(ids,)) for ids in prompts]
    began = time.monotonic()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        raise failed[0]
    return len(prompts) * n / (time.monotonic() - began)


def repetitions(args: argparse.Namespace) -> Iterator[int]:
    """-1 for the round that warms up, then the numbers of repetitions: at least one, no more than are asked for, and
    no further one that would not fit into --seconds if it took as long as the longest so far."""
    end, longest = time.monotonic() + args.seconds, 0.0
    yield -1
    for number in range(args.repetitions):
        began = time.monotonic()
        if number and began + longest > end:
            tell(f"{number} of {args.repetitions} repetitions: more take longer than --seconds {args.seconds:g}")
            return
        yield number
        longest = max(longest, time.monotonic() - began)


def tell(text: str) -> None:
    """A line that is no part of the table."""
    print(text, file=sys.stderr, flush=True)


def clients(args: argparse.Namespace) -> None:
    """The table of --clients."""
    rng = random.Random(args.seed)
    servers = {name: Server(name, args.model, args.threads, args.n_prompt + args.n_gen + 64) for name in args.runtime}
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    try:
        for repeat in repetitions(args):
            for count in args.clients:
                prompts = [draw(rng, args.n_prompt, args.vocab) for _ in range(count)]
                for name, server in servers.items():
                    rate = together(server, prompts, args.n_gen if repeat >= 0 else 4)
                    if repeat >= 0:
                        rates[name, count].append(rate)
                        tell(f"{count} clients, {name}: {rate:.1f} tokens per second")
    finally:
        for server in servers.values():
            server.close()
    print(f"| clients | {' | '.join(args.runtime)} | ratio of best | {args.runtime[0]}: times one client |")
    print("|--:" * (len(args.runtime) + 3) + "|")
    for count in args.clients:
        best = [max(rates[name, count]) for name in args.runtime]
        cells = [f"{max(r):.1f} ({statistics.median(r):.1f})" for name in args.runtime for r in [rates[name, count]]]
        ratio = f"{best[0] / best[1]:.2f}" if len(best) == 2 else "-"
        single = rates[args.runtime[0], min(args.clients)]
        print(f"| {count} | {' | '.join(cells)} | {ratio} | {best[0] / max(single):.2f} |")


def kept(args: argparse.Namespace) -> None:
    """The table of --kept: prefills with and without kept states in turns, then a prompt that goes on from the last."""
    rng = random.Random(args.seed)
    n_ctx = args.kept + 256
    servers = {
        "states kept": Server(NAMES[0], args.model, args.threads, n_ctx),
        "nothing kept": Server(NAMES[0], args.model, args.threads, n_ctx, ("--cache-ram", "0")),
    }
    cold: dict[str, list[float]] = defaultdict(list)
    again: dict[str, list[tuple[float, int]]] = defaultdict(list)
    try:
        for repeat in repetitions(args):
            ids, more = draw(rng, args.kept if repeat >= 0 else 64, args.vocab), draw(rng, 32, args.vocab)
            for name, server in servers.items():
                first = server.complete(ids, 1)["timings"]
                second = server.complete(ids + more, 1)["timings"]
                if repeat >= 0:
                    cold[name].append(first["prompt_ms"])
                    again[name].append((second["prompt_ms"], second["prompt_n"]))
                    tell(f"{name}: {first['prompt_ms']:.0f} ms, then {second['prompt_ms']:.0f} ms")
    finally:
        for server in servers.values():
            server.close()
    print("| | first prompt, ms: best (median) | 32 tokens more, ms: best (median) | tokens computed for them |")
    print("|---|--:|--:|--:|")
    for name in servers:
        times = [t for t, _ in again[name]]
        print(
            f"| {name} | {min(cold[name]):.0f} ({statistics.median(cold[name]):.0f}) "
            f"| {min(times):.0f} ({statistics.median(times):.0f}) | {max(n for _, n in again[name])} |"
        )


def draw(rng: random.Random, n: int, vocab: int) -> list[int]:
    """A prompt of random ids."""
    return [rng.randrange(FIRST_IDS, vocab) for _ in range(n)]


def main() -> None:
    """Read the flags and measure."""
    if sys.argv[1:2] == ["--peer"]:
        path, threads, n_ctx, port = sys.argv[2:]
        server = peer_server(path, int(threads), int(n_ctx), SLOTS, int(port))
        threading.Event().wait()
        del server
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-m", "--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--clients", action="append", type=int, help="clients at once; can be repeated")
    parser.add_argument("--kept", type=int, help="tokens of a prompt, with and without kept states")
    parser.add_argument("-p", "--n-prompt", type=int, default=16, help="tokens of a client's prompt (default: 16)")
    parser.add_argument("-n", "--n-gen", type=int, default=64, help="tokens of an answer (default: 64)")
    parser.add_argument("-r", "--repetitions", type=int, default=3, help="at most (default: 3)")
    parser.add_argument("--seconds", type=float, default=120, help="begin no repetition beyond these (default: 120)")
    parser.add_argument("--runtime", action="append", choices=NAMES, help="only this one (default: both)")
    parser.add_argument("--vocab", type=int, default=200_000, help="prompts are random ids from 1,000 to here")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.runtime = args.runtime or list(NAMES)
    if args.kept:
        kept(args)
    if args.clients or not args.kept:
        args.clients = args.clients or [1, SLOTS]
        clients(args)


if __name__ == "__main__":
    main()

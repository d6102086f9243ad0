"""llama.cpp's predictions at every scored position of chunks of token ids, through the server of the xllamacpp wheel.

The server tells the probabilities of the whole vocabulary for the next token only. So each position is a request: the
chunk up to there, one token more than in the request before, whose state the server has kept. Run as a script it is the
process that holds the server. Meant for small vocabularies: an answer has a JSON object for each token.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from runtimes import free_port, peer_server, source_environment

LEAST = -104.0  # logarithm of less than the least float32, for a probability that the server rounds to 0

Array = npt.NDArray[Any]


def peer_logits(path: Path, chunks: Array, n_vocab: int, threads: int) -> Array:
    """Log-probabilities after each token of ``chunks[:, n_ctx // 2 : -1]``, chunk by chunk: float64 [n, n_vocab].

    ``chunks``: ids [chunks, n_ctx]. Raises RuntimeError with the end of the server's log if it fails.
    """
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+b") as log:
        given, made = Path(folder) / "ids.npy", Path(folder) / "logits.npy"
        np.save(given, chunks)
        command = [sys.executable, __file__, str(path), str(threads), str(n_vocab), str(given), str(made)]
        done = subprocess.run(command, stdout=log, stderr=log, env=source_environment(), check=False)
        if done.returncode or not made.exists():
            log.seek(0)
            raise RuntimeError(f"llama.cpp on {path}: {log.read().decode(errors='replace')[-2000:]}")
        return np.asarray(np.load(made))


def row(answer: dict[str, Any], n_vocab: int) -> Array:
    """Log-probabilities of an answer of ``/completion``: float64 [n_vocab]. Raises RuntimeError if one is missing."""
    if "completion_probabilities" not in answer:
        raise RuntimeError(str(answer)[:2000])
    out = np.full(n_vocab, np.nan)
    for token in answer["completion_probabilities"][0]["top_logprobs"]:
        out[token["id"]] = max(token["logprob"], LEAST)
    if np.isnan(out).any():
        raise RuntimeError(f"the server left out {np.isnan(out).sum()} of {n_vocab} tokens")
    return out


def main() -> None:
    """The child."""
    path, threads, n_vocab, given, made = sys.argv[1:]
    chunks = np.load(given)
    n_ctx = chunks.shape[1]
    port = free_port()
    server = peer_server(path, int(threads), n_ctx + 64, 1, port, warmup=False)
    assert server is not None  # keeps it alive
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
    fixed = {"n_predict": 1, "n_probs": int(n_vocab), "temperature": 0, "cache_prompt": True}
    fixed["response_fields"] = ["completion_probabilities"]
    rows = []
    for chunk in chunks.tolist():
        for end in range(n_ctx // 2 + 1, n_ctx):
            connection.request("POST", "/completion", json.dumps({"prompt": chunk[:end], **fixed}))
            rows.append(row(json.loads(connection.getresponse().read()), int(n_vocab)))
    np.save(made, np.array(rows))
    os._exit(0)  # the server takes seconds to stop


if __name__ == "__main__":
    main()

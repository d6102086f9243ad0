"""-hf: which file is meant, and its download from a stand-in for the hub on loopback."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from qwen35rt.cli import hub, main
from qwen35rt.errors import ConfigError, ModelFileError

from .fixtures import write_script

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Enough of the hub's interface for listing and downloading."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.gets: list[str] = []
        self.cut = False  # end downloads in the middle

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(self.path.split("?")[0])
        if path.startswith("/api/models/"):
            repo = "/".join(path.split("/")[3:5])
            if repo not in self.server.repos:
                return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            files = [{"rfilename": n} for n in self.server.repos[repo]]
            info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": files, "private": False, "tags": []}
            return self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        parts = path.strip("/").split("/")  # user/repo/resolve/revision/file
        repo, name = "/".join(parts[:2]), "/".join(parts[4:])
        if repo in self.server.gated:
            return self._send(403, b"", {"X-Error-Code": "GatedRepo", "X-Repo-Commit": COMMIT})
        data = self.server.repos.get(repo, {}).get(name)
        if data is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        if body:
            self.server.gets.append(name)
        etag = hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        return self._send(200, data, headers, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool = True) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data[: len(data) // 2] if self.server.cut and "/resolve/" in self.path else data)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import huggingface_hub.constants as constants

    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        # huggingface-hub reads its variables when it is first imported, so its constants are set as well.
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.file_download.DEFAULT_ETAG_TIMEOUT", 5, raising=False)
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("quant", "file", "chosen"),
    [
        ("", None, ["m-Q4_K_M.gguf"]),
        ("q8_0", None, ["m-Q8_0.gguf"]),
        ("BF16", None, ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]),
        ("Q4_K", None, None),
        ("", "m-Q8_0.gguf", ["m-Q8_0.gguf"]),
        ("", "m-Q8_O.gguf", None),
    ],
)
def test_choice_of_the_file(quant: str, file: str | None, chosen: list[str] | None) -> None:
    names = [
        "README.md", "mmproj-F16.gguf", "mtp-Q4_K_M.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-UD-IQ2_M.gguf",
        "BF16/m-BF16-00002-of-00002.gguf", "BF16/m-BF16-00001-of-00002.gguf",
    ]  # fmt: skip
    if chosen is None:
        with pytest.raises(ModelFileError, match=r"m-Q8_0\.gguf"):
            hub.choose_files("u/r", names, quant, file)
    else:
        assert hub.choose_files("u/r", names, quant, file) == chosen


@pytest.mark.parametrize(
    ("names", "text"),
    [(["README.md"], "no GGUF file"), (["a-00001-of-00003.gguf", "a-00003-of-00003.gguf"], "2 of its 3 parts")],
)
def test_repositories_that_have_no_whole_model(names: Sequence[str], text: str) -> None:
    with pytest.raises(ModelFileError, match=text):
        hub.choose_files("u/r", names)


@pytest.mark.parametrize("spec", ["repo", "a/b/c", "a/", "../x:y", "http://x/y"])
def test_malformed_names(spec: str) -> None:
    with pytest.raises(ConfigError, match="USER/REPO"):
        hub.fetch(spec)


def test_download_then_run_then_use_the_copy(
    server: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_script(tmp_path / "s.gguf", [b"one ", b"two"]).read_bytes()
    server.repos["user/repo-GGUF"] = {"m-Q8_0.gguf": data, "m-Q4_0.gguf": b"no", "README.md": b"x"}
    args = ["run", "-hf", "user/repo-GGUF:q8_0", "--device", "reference", "hi"]
    assert main(args) == 0
    out, err = capfd.readouterr()
    assert out == "one two"
    assert "m-Q8_0.gguf" in err
    assert "downloading m-Q8_0.gguf of user/repo-GGUF" in err
    assert server.gets == ["m-Q8_0.gguf"]
    assert main(args) == 0
    assert server.gets == ["m-Q8_0.gguf"]
    assert "downloading" not in capfd.readouterr().err
    # Without a network the copy serves.
    server.repos.clear()
    monkeypatch.setattr(hub, "_list", _no_network)
    assert main(args) == 0
    out, err = capfd.readouterr()
    assert out == "one two"
    assert "using the copy from before" in err


def test_progress_bar_on_a_terminal(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    server.repos["u/bar"] = {"m-Q8_0.gguf": b"x" * 100_000}
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    hub.fetch("u/bar")
    assert "m-Q8_0.gguf: 100%" in screen.getvalue()


def test_download_that_breaks_off(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repos["u/cut"] = {"m-Q8_0.gguf": b"x" * 100_000}
    server.cut = True
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client waits before it tries again
    with pytest.raises(ModelFileError, match=r"u/cut: the download of m-Q8_0\.gguf failed .*run it again"):
        hub.fetch("u/cut")
    server.cut = False
    assert hub.fetch("u/cut").stat().st_size == 100_000


def _no_network(repo: str) -> list[str]:
    raise ConnectionError("no network")


def test_split_model_is_downloaded_whole(server: Hub) -> None:
    names = [f"m-Q4_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    server.repos["u/r"] = {name: name.encode() for name in names}
    path = hub.fetch("u/r:Q4_0")
    assert path.name == names[0]
    assert [(path.parent / n).read_bytes() for n in names] == [n.encode() for n in names]


def test_repository_that_is_not_there(server: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-hf", "no/such", "hi"]) == 1
    assert "no/such: no such repository, or a private one" in capsys.readouterr().err


def test_gated_repository(server: Hub) -> None:
    server.repos["u/gated"] = {"m-Q8_0.gguf": b"x"}
    server.gated.add("u/gated")
    with pytest.raises(ModelFileError, match=r"u/gated: access must be asked for.*HF_TOKEN"):
        hub.fetch("u/gated")


def test_no_network_and_no_copy(monkeypatch: pytest.MonkeyPatch, server: Hub) -> None:
    monkeypatch.setattr(hub, "_list", _no_network)
    with pytest.raises(ModelFileError, match=r"cannot be reached \(ConnectionError: no network\)"):
        hub.fetch("u/none")

"""The examples of the README and of docs/server.md run as they are written; the address alone is replaced."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from qwen35rt.bench import command as bench
from qwen35rt.cli import COMMANDS
from qwen35rt.cli.parser import Parser
from qwen35rt.config import ENGINE
from qwen35rt.server import routes
from qwen35rt.server.metrics import COUNTERS, GAUGES, Metrics
from qwen35rt.server.model import ModelFacts
from tests.fixtures import write_script, write_tiny
from tests.implementations import native
from tests.server.chat_templates import QUIET
from tests.server.fake import asynchronous
from tests.server.live import eventually
from tests.server.test_serve import Child

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/server.md")
ADDRESS = "localhost:8080"
SERVE = ("qwen35rt serve", "qwen35rt serve -m model.gguf --alias small --ctx-size 8192 --parallel 2")
needs_native = pytest.mark.skipif(native() is None, reason="the compiled module qwen35rt._native is not built")
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
needs_openai = pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="openai is not installed")


@dataclass(frozen=True)
class Example:
    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text.splitlines()[-1][:60]}"


def blocks(page: str, language: str) -> list[Example]:
    """Fenced blocks of a page."""
    found = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [Example(page, text) for text in found]


def commands(page: str) -> list[Example]:
    """Each command of the shell blocks of a page, on one line."""
    lines = [line for b in blocks(page, "sh") for line in b.text.replace("\\\n", " ").splitlines()]
    return [Example(page, re.sub(r"\s+#.*", "", line)) for line in lines]


PARSED = [c for page in (*PAGES, "docs/performance.md") for c in commands(page) if c.text.startswith("qwen35rt ")]
CURLS = [c for page in PAGES for c in commands(page) if c.text.startswith("curl ") and ADDRESS in c.text]
CLIENTS = [b for page in PAGES for b in blocks(page, "python") if ADDRESS in b.text]


def local(page: str, call: str) -> str:
    """The one Python block of a page that makes a call of the package."""
    (found,) = [b.text for b in blocks(page, "python") if call in b.text]
    return found


# ------------------------------------------------------------------------------------------- what is written


def test_no_example_is_left_out() -> None:
    """Each is of a kind that a test here runs; those that install are run by .ci/run."""
    known = {c.text for c in PARSED + CURLS}
    others = [c.text for page in PAGES for c in commands(page) if c.text not in known]
    assert [c for c in others if not c.startswith("python3 -m venv .venv && .venv/bin/pip install ")] == []
    ours = {local("README.md", "qwen35rt.load("), local("docs/server.md", "create_app(")}
    assert {b.text for page in PAGES for b in blocks(page, "python")} == ours | {b.text for b in CLIENTS}
    assert {c.page for c in CURLS} == {c.page for c in CLIENTS} == set(PAGES)


@pytest.mark.parametrize("example", PARSED, ids=str)
def test_commands_are_understood(example: Example) -> None:
    _, name, *args = shlex.split(example.text)
    assert name in COMMANDS
    parser = Parser(f"qwen35rt {name}", "")
    module = bench if name == "bench" else importlib.import_module(f"qwen35rt.cli.{name}")
    module.add_arguments(parser)
    parser.parse_args(args)


def test_endpoints_of_the_readme_exist() -> None:
    rows = re.findall(r"^\| (GET|POST) \| (.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    found = {(method, path) for method, paths in rows for path in re.findall(r"`(.*?)`", paths)}
    assert len(found) > 10
    assert found <= set(routes.STAGE_1)


def section(title: str) -> str:
    """A section of docs/server.md."""
    (found,) = re.findall(
        rf"^## {title}\n(.*?)(?=^## |\Z)", (ROOT / "docs" / "server.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return str(found)


def test_metrics_of_the_document_are_those_of_the_server() -> None:
    metrics = Metrics(lambda: None)
    metrics.loaded(ModelFacts(id="tiny", n_ctx=256, n_vocab=320, device="cpu", hash="0"))
    known = {"gauge": {*GAUGES, "info", "device_info"}, "histogram": {*metrics._histograms, "iteration_tokens_total"}}
    known["counter"] = {*COUNTERS, *(f"{name}_total" for name in metrics._counters)}
    tables = dict(re.findall(r"^\| (gauge|counter|histogram) \|.*?\n(.*?)\n\n", section("Metrics"), re.DOTALL | re.M))
    rows = {kind: re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for kind, text in tables.items()}
    found = {kind: {name for row in names for name in re.findall(r"`(\w+)", row)} for kind, names in rows.items()}
    assert found == known


def test_numbers_of_reuse_are_those_of_the_engine() -> None:
    """C29: where states are kept, and how many."""
    text = " ".join(section("Reuse of state").split())
    for part in (
        f"each of the last {ENGINE.keep_messages} messages",
        f"at least {ENGINE.keep_least} tokens",
        f"multiples of {ENGINE.page_tokens} tokens",
        f"every {ENGINE.keep_every:,} tokens",
        f"at most {ENGINE.max_cache_states};",
    ):
        assert part in text


# ----------------------------------------------------------------------------------------------- what is asked

CALL = ("<tool_call>", b"\n<function=temperature>\n<parameter=city>\nOslo\n</parameter>\n</function>\n", "</tool_call>")


@dataclass
class Served:
    """A server in a process. ``scripted``: it calls the tool temperature in every answer."""

    url: str
    folder: Path
    scripted: bool
    marks: list[str] = field(default_factory=list)

    def run(self, line: list[str]) -> str:
        """What a command with the server's address in it prints; it must succeed."""
        line = [part.replace(ADDRESS, self.url.removeprefix("http://")) for part in line]
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        done = subprocess.run(line, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def requests(self) -> list[dict[str, Any]]:
        """Requests since the last call, from the log; one of ours marks their end there."""
        mark = f"mark-{len(self.marks)}"
        with httpx.Client(trust_env=False) as client:
            client.get(f"{self.url}/version", headers={"x-request-id": mark})
        log = self.folder / "requests.jsonl"
        eventually(lambda: f'"{mark}"' in log.read_text())
        found = [json.loads(line) for line in log.read_text().splitlines()]
        names = [entry["id"] for entry in found]
        first = names.index(self.marks[-1]) + 1 if self.marks else 0
        self.marks.append(mark)
        return found[first : names.index(mark)]


@pytest.fixture(scope="module", params=SERVE)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Started by a line of the pages, in a folder with the file that they name."""
    command = request.param
    assert command in [c.text for c in PARSED]
    folder = tmp_path_factory.mktemp("readme")
    template = "{% if tools %}<function=NAME>{% endif %}" + QUIET
    write_script(folder / "model.gguf", (b"Let me ", b"look.", b"\n\n", *CALL), chat_template=template)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("QWEN35RT_")]:
            patch.delenv(name)
        patch.chdir(folder)
        args = [*shlex.split(command)[2:], "--port", "0", "--log-jsonl", str(folder / "requests.jsonl")]
        with Child(*args) as child:
            yield Served(child.url(), folder, "-m" in args)


def check_chat(text: str) -> None:
    body = json.loads(text)
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["finish_reason"] in ("stop", "length")
    assert body["usage"]["completion_tokens"] > 0


def check_stream(text: str) -> None:
    *lines, last = [line.removeprefix("data: ") for line in text.splitlines() if line]
    events = [json.loads(line) for line in lines]
    assert last == "[DONE]"
    assert {e["object"] for e in events} == {"chat.completion.chunk"}
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events)
    assert events[-1]["usage"]["completion_tokens"] > 0


def check_text(text: str) -> None:
    body = json.loads(text)
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"]
    assert body["seed"] == 1


def check_slots(text: str) -> None:
    slots = json.loads(text)
    assert slots
    assert all({"id", "n_cached", "n_tokens"} <= set(slot) for slot in slots)


def check_metrics(text: str) -> None:
    assert "qwen35rt:prefix_cache_hits" in {f.name for f in text_string_to_metric_families(text)}


CHECKS: dict[str, Callable[[str], None]] = {
    "/v1/chat/completions": check_chat,
    "/v1/completions": check_text,
    "/slots": check_slots,
    "/metrics": check_metrics,
}


@needs_native
@needs_curl
@pytest.mark.parametrize("example", CURLS, ids=str)
def test_curl_gets_an_answer(served: Served, example: Example) -> None:
    (path,) = re.findall(re.escape(ADDRESS) + r"(\S*)", example.text)
    told = served.run(["bash", "-c", example.text])
    (check_stream if " -N " in example.text else CHECKS[path])(told)


@needs_native
@needs_openai
@pytest.mark.parametrize("example", CLIENTS, ids=lambda e: str(e.page))
def test_openais_client_gets_answers(served: Served, example: Example) -> None:
    served.requests()
    told = served.run([sys.executable, "-c", example.text])
    requests = served.requests()
    assert {(r["endpoint"], r["status"], r["outcome"]) for r in requests} == {("/v1/chat/completions", 200, "success")}
    assert len(requests) >= example.text.count(".create(")
    assert any(r["stream"] for r in requests) == ("stream=True" in example.text)
    assert told.strip()
    if not served.scripted:
        return
    if example.page == "README.md":
        assert told.splitlines()[-1] == 'temperature {"city": "Oslo"}'
    else:  # it calls the tool in every round
        assert len(requests) == 5


# ------------------------------------------------------------------------------------------------- from Python


@needs_native
def test_the_python_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    exec(compile(local("README.md", "qwen35rt.load("), "README.md", "exec"), {})
    told = capsys.readouterr().out
    assert re.search(r" (stop|length) \d+ (True|False)\n", told)
    assert re.search(r"\nHello \(\d, 320\)\n$", told)


@needs_native
@asynchronous
async def test_an_application_for_other_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(local("docs/server.md", "create_app("), "server.md", "exec"), names)
    async with names["app"].test_app() as running:
        client, host = running.test_client(), {"Host": "models.example.org"}
        async with asyncio.timeout(60):
            while (await client.get("/readyz", headers=host)).status_code != 200:
                await asyncio.sleep(0.02)
        assert (await client.get("/v1/models", headers=host)).status_code == 401
        told = await client.get("/v1/models", headers=host | {"x-api-key": "secret"})
        assert (await told.get_json())["data"][0]["max_model_len"] == 4096

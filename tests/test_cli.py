"""The command line: what goes to which stream, exit codes, one-line errors, and start-up time."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from qwen35rt import cli
from qwen35rt.cli import COMMANDS, console, main
from qwen35rt.cli.parser import nearest

from .fixtures import write_script, write_tiny

ON = ["--device", "reference"]


@pytest.fixture
def script(tmp_path: Path) -> str:
    return str(write_script(tmp_path / "script.gguf", [b"one ", b"two ", b"three"]))


def run(*args: str, timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qwen35rt", *args], capture_output=True, text=True, timeout=timeout, **options
    )


def feed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_stdout_carries_the_text_only(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-m", script, *ON, "hi"]) == 0
    out, err = capsys.readouterr()
    assert out == "one two three"
    assert "generated 4 tokens" in err
    assert "tokens/s" in err
    assert "on_gpu false" in err
    assert "device reference" in err


def test_run_without_a_model_says_what_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "What is qwen35rt?", "--temp", "0"]) == 0
    out, err = capsys.readouterr()
    assert "GGUF" in out
    assert len([line for line in err.splitlines() if "no model was named" in line and "-m FILE" in line]) == 1


def test_run_flags(script: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "-m", script, *ON, "--raw", "-p", "hi", "-n", "2", "-c", "64", "-b", "1", "-s", "3"]) == 0
    assert capsys.readouterr().out == "one two "
    assert main(["run", "-m", script, *ON, "hi", "--stop", "tw"]) == 0
    assert capsys.readouterr().out == "one "
    (tmp_path / "prompt.txt").write_text("hi")
    assert main(["run", "-m", script, *ON, "-f", str(tmp_path / "prompt.txt"), "-sys", "be brief"]) == 0
    assert capsys.readouterr().out == "one two three"


def test_run_uses_the_chat_template_unless_raw(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, "hi")
    assert main(["run", "-m", script, *ON]) == 0
    templated = capsys.readouterr().err
    feed(monkeypatch, "hi")
    assert main(["run", "-m", script, *ON, "-no-cnv"]) == 0
    assert "prompt 2 tokens" in capsys.readouterr().err
    assert "prompt 2 tokens" not in templated


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["run", "--tempp", "1", "x"], "unknown flag '--tempp', did you mean '--temp'?"),
        (["run", "--promt=x"], "unknown flag '--promt', did you mean '--prompt'?"),
        (["bench", "--repetition", "1"], "unknown flag '--repetition', did you mean '--repetitions'?"),
        (["rnu", "x"], "unknown command 'rnu', did you mean 'run'?"),
        (["--vresion"], "unknown flag '--vresion'"),
        (["run", "--temp", "nan", "x"], "'nan' is not a number from 0 to 2"),
        (["run", "-n", "1.5", "x"], "'1.5' is not a whole number"),
        (["run", "one", "two"], "'two' was not expected; quote"),
        (["chat", "--think", "maybe"], "invalid choice"),
        # An unset variable of a script is no wish for the embedded model.
        (["run", "-m", "", "x"], "it is empty"),
        (["tokenize", "-hf", "", "x"], "it is empty"),
        (["serve", "-m", ""], "it is empty"),
        (["serve", ""], "it is empty"),
        (["bench", "-m", ""], "it is empty"),
        (["info", ""], "it is empty"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    args: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qwen35rt: error: ")
    assert err.count("\n") == 1
    assert text in err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["run", "-p", "a", "b"], "more than once"),
        (["run", "--raw", "-sys", "x", "y"], "--raw"),
        (["run", "-m", "a", "-hf", "b/c", "x"], "two models"),
        (["run", "--hf-file", "x", "y"], "-hf"),
        (["run", "-hf", "nonsense", "x"], "USER/REPO"),
        (["run", *ON, ""], "empty"),
        (["run", "--device", "gpu", "x"], "'gpu'"),
        (["run", "-f", "/nonexistent/x"], "No such file"),
    ],
)
def test_errors_are_one_line_and_exit_code_1(args: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    # The template of the embedded model would make a prompt of the empty text.
    if args[-1] == "":
        args = [*args, "--raw"]
    assert main(args) == 1
    out, err = capsys.readouterr()
    assert out == ""
    line = err.splitlines()[-1]
    assert line.startswith("qwen35rt: error: ")
    assert text in line
    assert "Traceback" not in err


def test_b37_b47_bad_files(tmp_path: Path, tiny_dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = tmp_path / "half.gguf"
    shutil.copy(tiny_dense, half)
    with half.open("r+b") as f:
        f.truncate(half.stat().st_size // 2)
    foo = write_tiny(tmp_path / "foo.gguf", metadata={"general.architecture": "foo"})
    for path, words in ((tmp_path / "no.gguf", ["no such file"]), (half, ["truncated"]), (foo, ["foo", "qwen35moe"])):
        assert main(["run", "-m", str(path), *ON, "hi"]) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert all(word in err for word in [*words, path.name])


def test_an_unforeseen_error_has_no_traceback_unless_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(console, "open_model", broken)
    assert main(["run", "x"]) == 1
    err = capsys.readouterr().err
    assert err == "qwen35rt: error: internal error, KeyError: 'oops' (--verbose shows where)\n"
    assert main(["run", "x", "-v"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_b90_cuda_that_does_not_work_is_an_error_within_5_s() -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has an NVIDIA driver")
    began = time.monotonic()
    done = run("run", "--device", "cuda", "hi")
    assert time.monotonic() - began < 5
    assert done.returncode == 1
    assert done.stdout == ""
    assert "device cuda does not work here: " in done.stderr
    assert done.stderr.count("\n") <= 2


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["bench", "--help"]])
def test_help_is_quick_and_imports_nothing_heavy(args: list[str]) -> None:
    spent = []
    for _ in range(3):
        # Processor time, not the clock: other programs run beside the tests.
        before = os.times()
        assert run(*args).returncode == 0
        after = os.times()
        spent.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(spent) < 0.15
    command = [sys.executable, "-X", "importtime", "-m", "qwen35rt", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "argparse" in loaded
    assert loaded.isdisjoint({"numpy", "tokenizers", "gguf", "huggingface_hub", "tqdm", "psutil", "minijinja", "cupy"})


def test_help_lists_every_command_and_each_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert f"  {name} " in text
        assert main([name, "--help"]) == 0
        assert f"usage: qwen35rt {name}" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("qwen35rt 0.")


def test_reader_that_goes_away_is_no_error(script: str) -> None:
    command = f"{sys.executable} -m qwen35rt run -m {script} --device reference --ignore-eos -n 400 hi | head -c 3"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "one"
    assert done.returncode == 0
    assert "rror" not in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_streams_that_are_closed_are_like_dev_null(script: str, closed: str) -> None:
    here = f"{sys.executable} -m qwen35rt run -m {script} --device reference --raw"
    given = "" if "<" in closed else "hi"
    done = subprocess.run(
        ["bash", "-c", f"{here} {given} {closed}"], capture_output=True, text=True, timeout=60, check=False
    )
    # Nothing comes from a closed standard input, and an empty prompt is refused.
    assert (done.returncode, done.stdout) == (
        (1, "") if "<" in closed else (0, "" if closed == ">&-" else "one two three")
    )
    assert "internal error" not in done.stderr


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_what_standard_output_cannot_write_is_escaped(encoding: str, tmp_path: Path) -> None:
    """The words of a model and the names of its tokens and files are not ours to choose."""
    text = "é \u2603"
    model = write_script(tmp_path / "m\udcff.gguf", [text.encode()])

    def written(*args: str) -> bytes:
        command = [sys.executable, "-m", "qwen35rt", *args]
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        return subprocess.run(command, capture_output=True, timeout=60, check=True, env=environment).stdout

    assert written("run", "-m", str(model), *ON, "--raw", "hi") == text.encode(encoding, "backslashreplace")
    found = json.loads(written("info", str(model), "--json", "--full").decode(encoding))
    assert found["files"] == [str(model)]
    assert "Ġ" in "".join(found["metadata"]["tokenizer.ggml.tokens"])


def test_sigint_ends_run_with_130(script: str) -> None:
    args = [sys.executable, "-m", "qwen35rt", "run", "-m", script, *ON, "--ignore-eos", "-n", "-1", "hi"]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert os.read(process.stdout.fileno(), 3) == b"one"
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        err = process.stderr.read().decode()
        assert process.wait(30) == 130
    assert "Traceback" not in err


def test_tokenize(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", "-m", script, "hello<|im_end|>", "--ids", "--special"]) == 0
    marked = json.loads(capsys.readouterr().out)
    assert len(marked) == 2
    assert main(["tokenize", "-m", script, "hello<|im_end|>", "--show-count"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("-> 'hello'")
    assert lines[-1] == f"total: {len(lines) - 1} tokens"
    assert len(lines) > 3
    assert main(["tokenize", "-m", script, "é"]) == 0
    assert [line.split("-> ")[1] for line in capsys.readouterr().out.splitlines()] == [r"b'\xc3'", r"b'\xa9'"]


def test_info(tiny_dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tiny_dense), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metadata"]["general.architecture"] == "qwen35"
    assert found["metadata"]["tokenizer.ggml.tokens"]["length"] == 320
    assert found["supported"] == "yes"
    assert found["tensor_count"] == len(found["tensors"]) > 40
    assert {"name": "output_norm.weight", "shape": [64], "type": "F32", "bytes": 256} in found["tensors"]
    assert main(["info", "-m", str(tiny_dense)]) == 0
    text = capsys.readouterr().out
    assert "blk.0.attn_qkv.weight" in text
    assert "qwen35.block_count = 4" in text
    foo = write_tiny(tmp_path / "foo.gguf", metadata={"general.architecture": "foo"})
    assert main(["info", str(foo), "--json", "--full", "--no-tensors"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["supported"].startswith("no: ")
    assert len(other["metadata"]["tokenizer.ggml.tokens"]) == 320
    assert "tensors" not in other


@pytest.mark.parametrize("flags", [[], ["--full"]])
def test_info_writes_json_whatever_numbers_a_file_has(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = [1.5, float("nan"), float("-inf"), *[0.25] * 5]
    model = write_tiny(tmp_path / "m.gguf", metadata={"x.some": numbers, "x.one": float("inf")})
    assert main(["info", str(model), "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["metadata"]
    some = found["x.some"] if flags else found["x.some"]["first"]
    assert (some[:3], found["x.one"]) == ([1.5, "nan", "-inf"], "inf")


def test_progress_shows_long_stages_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 4.0, 6.0, 7.0, 12.0, 13.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))  # type: ignore[attr-defined]
    with console.Progress() as progress:
        for done in range(6):
            progress("prompt", done * 100, 1000)
        progress("other", 1, 2)
    assert capsys.readouterr().err == "prompt: 300/1000 (30%)\nprompt: 500/1000 (50%)\n"


def test_progress_bar_on_a_terminal_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    clock = iter([0.0, 0.6, 0.65, 0.8])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))  # type: ignore[attr-defined]
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with console.Progress() as progress:
        for done in (0, 25, 50, 100):
            progress("prompt", done, 100)
    text = screen.getvalue()
    assert "prompt: 25/100 (25%) [######" in text
    assert "50/100" not in text
    assert text.endswith("\r\x1b[K")


def test_nearest() -> None:
    assert nearest("--tmep", ["--temp", "--top-k"]) == ", did you mean '--temp'?"
    assert nearest("--zzz", ["--temp"]) == ""
    assert cli.help_text().count("\n") > 10

"""Faults of tests_required.md through load() and the command line: hostile files, devices, text (B34 to B90)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import qwen35rt
from qwen35rt import errors
from qwen35rt.backends.cuda import driver_problem
from qwen35rt.cli import main
from qwen35rt.model.gguf_file import open_gguf

from .fixtures import write_script, write_tiny
from .implementations import native
from .model.test_gguf_hostile import HOSTILE

pytestmark = pytest.mark.skipif(native() is None, reason="the compiled module qwen35rt._native is not built")
load = partial(qwen35rt.load, device="cpu")


@pytest.fixture(scope="module", autouse=True)
def _settings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("QWEN35RT_ISA", "QWEN35RT_THREADS", "QWEN35RT_N_GPU_LAYERS"):
            patch.delenv(name, raising=False)
        yield


def command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, "-m", "qwen35rt", *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, env=env, check=False)


def refused(
    capsys: pytest.CaptureFixture[str],
    path: Path,
    kind: type[Exception],
    words: Sequence[str],
    other: Sequence[str] = ("bench", "-p", "1", "-n", "1"),
) -> str:
    """load() refuses the file with ``kind``, run and an ``other`` command with one line; -> the message."""
    with pytest.raises(kind) as caught:
        load(path)
    message = str(caught.value)
    for name, *rest in (("run", "--device", "cpu", "hi"), other):
        capsys.readouterr()
        assert 1 <= main([name, "-m", str(path), *rest]) <= 63
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        line = err.splitlines()[-1]
        assert line.startswith("qwen35rt: error: ")
        assert " ".join(message.split()) in line
    assert all(word in message for word in words)
    return message


# ------------------------------------------------------------------------------------------ B34 to B38, B47: files


@pytest.mark.parametrize("name", HOSTILE)
def test_b34_b35_b36_b37_hostile_files(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every hand-made file of the container's tests is refused in under a second by what users call."""
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[name][0])
    began = time.perf_counter()
    with pytest.raises(errors.ModelFileError):
        load(path)
    assert time.perf_counter() - began < 1
    refused(capsys, path, errors.ModelFileError, ["hostile.gguf", HOSTILE[name][1]])


@pytest.mark.parametrize("name", ["b34 dims 1 0", "b34 dims 0", "b34 empty key", "b35 offset", "b36 nested 10,000"])
def test_b34_the_command_exits_without_a_signal(tmp_path: Path, name: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[name][0])
    done = command("run", "-m", path, "--device", "cpu", "hi")
    assert 1 <= done.returncode <= 63
    assert done.stdout == ""
    assert HOSTILE[name][1] in done.stderr
    assert done.stderr.count("\n") == 1


def test_b37_half_downloaded(tmp_path: Path, tiny_dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut in the header, the keys, the tensor table and the data: both sizes and the file's name."""
    whole, path = tiny_dense.read_bytes(), tmp_path / "half.gguf"
    table = whole.index(b"blk.2.ffn_up.weight")
    for n in (3, 4, 23, 200, 3000, table, table + 40, len(whole) // 2, len(whole) - 4096):
        path.write_bytes(whole[:n])
        message = refused(capsys, path, errors.ModelFileError, ["half.gguf: truncated", f"the file has {n}"])
        assert n < int(message.split("needs ")[-1].split()[0]) <= len(whole)
    # The last tensor less one byte: the file may end in padding, so its end is found, not assumed.
    needed = int(message.split("needs ")[-1].split()[0])
    path.write_bytes(whole[: needed - 1])
    refused(capsys, path, errors.ModelFileError, ["tensor '", f"needs {needed} bytes", f"the file has {needed - 1}"])
    path.write_bytes(whole[:needed])
    load(path).close()


@pytest.mark.parametrize(
    "name", ["blk.2.ffn_down_exps.weight", "blk.0.ffn_gate_inp.weight", "blk.3.ffn_gate_inp_shexp.weight"]
)
def test_b38_a_complete_file_with_a_renamed_tensor(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(tmp_path / "moe.gguf", "moe", rename={name: name.replace("ffn", "fnn")})
    message = refused(capsys, path, errors.ModelFileError, [f"tensor '{name}' is missing", "qwen35moe"])
    assert "truncated" not in message
    done = command("run", "-m", path, "hi")
    assert 1 <= done.returncode <= 63
    assert f"tensor '{name}' is missing" in done.stderr


@pytest.mark.parametrize(
    ("value", "shown"), [("foo", "'foo'"), (None, "missing"), ("", "''"), (5, " 5 "), (True, "True"), (["a"], "['a']")]
)
def test_b47_unknown_architecture(tmp_path: Path, value: Any, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "m.gguf", metadata={"general.architecture": value})
    refused(capsys, path, errors.UnsupportedModel, [shown, "supported: qwen35, qwen35moe", "m.gguf"])
    capsys.readouterr()
    assert main(["info", str(path)]) == 0  # what the file is can still be looked at
    assert "supported: qwen35, qwen35moe" in capsys.readouterr().out


def test_b47_the_command_has_no_traceback(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", metadata={"general.architecture": "foo"})
    done = command("run", "-m", path, "hi")
    assert 1 <= done.returncode <= 63
    assert done.stderr.count("\n") == 1
    assert "'foo' is not supported; supported: qwen35, qwen35moe" in done.stderr


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokenizer.ggml.model", None, "tokenizer.ggml.model is missing"),
        ("tokenizer.ggml.eos_token_id", 320, "outside 0..319"),
        ("tokenizer.ggml.eos_token_id", "x", "a token id is needed"),
        ("tokenizer.ggml.tokens", [1] * 320, "not a list of texts"),
        ("tokenizer.ggml.merges", [7], "not a list of texts"),
    ],
)
def test_b36_values_of_the_tokenizer(
    tmp_path: Path, key: str, value: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(tmp_path / "m.gguf", metadata={key: value})
    refused(capsys, path, errors.ModelFileError, ["m.gguf: ", words], ("tokenize", "hi"))


def test_b36_fewer_tokens_than_embeddings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "m.gguf", n_vocab=352)
    meta = dict(open_gguf(path).metadata)
    keys = {f"tokenizer.ggml.{k}": meta[f"tokenizer.ggml.{k}"][:340] for k in ("tokens", "token_type")}
    path = write_tiny(tmp_path / "less.gguf", n_vocab=352, metadata=keys)
    refused(capsys, path, errors.ModelFileError, ["less.gguf: ", "340 tokens", "352"], ("run", "--raw", "hi"))


def test_b36_a_template_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": 5})
    refused(capsys, path, errors.ModelFileError, ["m.gguf: tokenizer.chat_template is not a text"], ("chat",))


# ------------------------------------------------------------------------------------------ B44, B45, B53, B54, B83


def test_b44_the_template_of_the_file_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = "{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}!"
    path = write_tiny(tmp_path / "t.gguf", chat_template=template)
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    with load(path) as model:
        assert model.render(messages) == "<system>be<user>hi!"
        n = len(model.tokenize("<system>be<user>hi!"))
        assert model.chat(messages, max_tokens=1, ignore_eos=True).usage.prompt_tokens == n
    assert main(["run", "-m", str(path), "-sys", "be", "hi", "-n", "1"]) == 0
    assert f"prompt {n} tokens" in capsys.readouterr().err


def test_b44_without_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "t.gguf", chat_template=None)
    with load(path) as model:
        with pytest.raises(errors.TemplateError, match=r"no chat template \(tokenizer\.chat_template\)"):
            model.chat([{"role": "user", "content": "hi"}])
        assert model.generate("hi", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
    assert main(["run", "-m", str(path), "--raw", "hi", "-n", "1"]) == 0
    assert "prompt 2 tokens" in capsys.readouterr().err


def test_b45_markers_stored_as_normal_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    markers, chain = ["<|im_start|>", "<|im_end|>"], [b"one ", b"two"]
    messages = [{"role": "user", "content": "hi"}]
    with load(write_script(tmp_path / "right.gguf", chain)) as model:
        want = model.chat(messages, temperature=0)
    assert not caplog.records
    with load(write_script(tmp_path / "wrong.gguf", chain, markers_as_normal=markers)) as model:
        done = model.chat(messages, temperature=0)
        pieces = list(model.chat_stream(messages, temperature=0))
    assert (done.text, done.finish_reason, done.usage) == ("one two", "stop", want.usage)
    assert "".join(pieces) == "one two"
    assert all(m in caplog.text for m in markers)


SPLIT = [b"\xf0", b"\x9f", b"\x98", b"\x80", b"\xe3", b"\x81", b"x", b" and text"]


@pytest.mark.parametrize("around", [(), ("<think>", "</think>")], ids=["content", "reasoning"])
def test_b53_characters_split_over_tokens(
    tmp_path: Path, around: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_script(tmp_path / "s.gguf", [*around[:1], *SPLIT, *around[1:]])
    text = "".join((*around[:1], "😀\ufffdx and text", *around[1:]))
    with load(path) as model:
        deltas = list(model.stream("go", temperature=0))
        whole = model.generate("go", temperature=0)
    assert "".join(deltas) == whole.text == text
    first = next(i for i, d in enumerate(deltas) if "\ufffd" in d)
    assert "😀" in deltas[:first]
    assert not any("\ufffd" in d for d in deltas[:first])
    assert main(["run", "-m", str(path), "--temp", "0", "go"]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("n", [1, 2, 3])
def test_b54_answer_that_ends_inside_a_character(tmp_path: Path, n: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_script(tmp_path / "s.gguf", SPLIT)
    with load(path) as model:
        stream = model.stream("go", max_tokens=n, temperature=0)
        text = "".join(stream)
        done = model.generate("go", max_tokens=n, temperature=0)
        assert model.generate("go", temperature=0).text.startswith("😀")  # the next one is whole
    for end in (stream.completion, done):
        assert (end.text, end.finish_reason, end.usage.completion_tokens) == (text, "length", n)
    assert text == "\ufffd"
    assert main(["run", "-m", str(path), "--temp", "0", "-n", str(n), "go"]) == 0
    assert capsys.readouterr().out == text


def test_b83_prompts_around_the_context(tiny_dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with load(tiny_dense, n_ctx=256) as model:
        done = model.generate([7] * 255, max_tokens=20, ignore_eos=True)
        assert (done.finish_reason, done.usage.prompt_tokens, done.usage.completion_tokens) == ("length", 255, 1)
        for n in (256, 1000):
            with pytest.raises(errors.ContextLengthExceeded, match=rf"{n} tokens .*256.*refused whole") as caught:
                model.generate([7] * n)
            assert (caught.value.n_prompt_tokens, caught.value.n_ctx) == (n, 256)
    args = ["run", "-m", str(tiny_dense), "--device", "cpu", "-c", "256", "--raw", "-n", "20", "--ignore-eos"]
    assert main([*args, "q" * 255]) == 0
    assert "ended by length" in capsys.readouterr().err
    assert main([*args, "q" * 256]) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("qwen35rt: error: the prompt has 256 tokens and the context holds 256")


# ------------------------------------------------------------------------------------------ B88, B90: devices


def test_b88_a_level_that_the_machine_lacks(tiny_dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = sorted(set(native().isa_names()) - set(native().isa_levels()))
    if not lacks:
        pytest.skip("this machine has every level of the build")
    done = command("run", "-m", tiny_dense, "--isa", lacks[0], "hi")
    assert done.returncode == 1
    assert lacks[0] in done.stderr
    assert "it has: scalar" in done.stderr
    assert done.stderr.count("\n") == 1
    for isa in lacks:
        monkeypatch.setenv("QWEN35RT_ISA", isa)
        with pytest.raises(errors.BackendUnavailable, match=isa):
            load(tiny_dense)


def test_b90_cuda_that_does_not_work_is_an_error_within_5_s(tiny_dense: Path) -> None:
    if driver_problem() is None:
        pytest.skip("this machine has an NVIDIA device")
    began = time.monotonic()
    with pytest.raises(errors.BackendUnavailable, match=r"device cuda does not work here: \w"):
        qwen35rt.load(tiny_dense, device="cuda")
    done = command("run", "-m", tiny_dense, "--device", "cuda", "hi")
    assert time.monotonic() - began < 5
    assert 1 <= done.returncode <= 63
    assert done.stdout == ""
    assert "device cuda does not work here: " in done.stderr


def test_b90_layers_for_a_gpu_that_is_not_there_are_an_error(
    tiny_dense: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As --device cuda, for every command; by the variable too. With none for a GPU the CPU runs and says so."""
    if driver_problem() is None:
        pytest.skip("this machine has an NVIDIA device")
    model = ["-m", str(tiny_dense)]
    for args in (
        ["run", *model, "hi", "-ngl", "2"],
        ["chat", *model, "--n-gpu-layers", "2"],
        ["bench", *model, "-p", "4", "-n", "0", "-r", "1", "--gpu-layers", "1"],
    ):
        assert main(args) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert "device cuda does not work here: " in err
    monkeypatch.setenv("QWEN35RT_N_GPU_LAYERS", "1")
    with pytest.raises(errors.BackendUnavailable, match="device cuda does not work here"):
        qwen35rt.load(tiny_dense)
    assert main(["run", *model, "-ngl", "0", "hi", "-n", "1"]) == 0
    assert "device cpu (" in (err := capsys.readouterr().err)
    assert "no layers are for a GPU" in err
    for wrong in ("-2", "x", "1.5"):
        assert main(["run", *model, "hi", f"-ngl={wrong}"]) == 2
        assert "-ngl" in capsys.readouterr().err


def test_b90_auto_works_and_says_cpu(tiny_dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if driver_problem() is None:
        pytest.skip("this machine has an NVIDIA device")
    with qwen35rt.load(tiny_dense) as model:
        assert model.device == "cpu"
        assert model.device_description.startswith("device cpu (")
        assert "cuda does not work here: " in model.device_description
        assert model.generate("hi", max_tokens=3, ignore_eos=True).on_gpu is False
    assert main(["run", "-m", str(tiny_dense), "hi", "-n", "3", "--ignore-eos"]) == 0
    err = capsys.readouterr().err
    assert "device cpu (" in err
    assert "cuda does not work here: " in err
    assert "on_gpu false" in err

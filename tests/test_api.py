"""The Python interface of design section 10, on the embedded model and on tiny ones."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qwen35rt
from qwen35rt import Model, errors
from qwen35rt.model import embedded

from .fixtures import write_script, write_tiny


@pytest.fixture(scope="module")
def tiny(tiny_dense: Path) -> Iterator[Model]:
    with load(tiny_dense) as model:
        yield model


def load(path: Path | None = None, **options: Any) -> Model:
    return qwen35rt.load(path, **{"device": "reference", **options})


def test_without_a_path_the_embedded_model_answers() -> None:
    with qwen35rt.load() as model:
        done = model.chat([{"role": "user", "content": "What is qwen35rt?"}], temperature=0.0)
        thought = model.chat([{"role": "user", "content": "What is Q8_0?"}], enable_thinking=True, temperature=0.0)
    assert done.finish_reason == thought.finish_reason == "stop"
    assert "GGUF" in done.text
    assert done.on_gpu is False
    reasoning, _, answer = thought.text.partition("</think>")
    assert reasoning.strip()
    assert "blocks of 32 weights" in answer


def test_embedded_model_is_small_and_its_absence_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert embedded.embedded_model().stat().st_size <= 8_000_000
    monkeypatch.setattr(embedded, "_PATH", tmp_path / "embedded.gguf")
    with pytest.raises(errors.ModelFileError, match=r"embedded.gguf.* install the package again"):
        qwen35rt.load()


def test_stream_joined_equals_generate(tiny: Model) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.2, "seed": 5, "ignore_eos": True}
    whole = tiny.generate("hello", **options)
    stream = tiny.stream("hello", **options)
    assert "".join(stream) == whole.text
    done = stream.completion
    assert (done.ids, done.finish_reason, done.seed) == (whole.ids, "length", 5)
    assert done.usage == whole.usage
    assert done.usage.total_tokens == done.usage.prompt_tokens + 12


def test_closed_stream_is_cancelled_and_leaves_the_model_usable(tiny: Model) -> None:
    stream = tiny.stream("hello", max_tokens=50, ignore_eos=True, temperature=0)
    next(stream)
    stream.close()
    assert list(stream) == []
    assert stream.completion.finish_reason == "cancelled"
    assert tiny.generate("hello", max_tokens=2, ignore_eos=True, temperature=0).usage.completion_tokens == 2


def test_streams_read_in_turns_go_on_where_they_were(tiny: Model) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
    for cache in (True, False):
        alone = [tiny.generate(p, **options).text for p in ("hello", "world")]
        streams = [tiny.stream(p, cache_prompt=cache, **options) for p in ("hello", "world")]
        texts = ["", ""]
        for _ in range(8):
            for i, stream in enumerate(streams):
                texts[i] += next(stream, "")
        assert texts == alone
        assert [s.completion.finish_reason for s in streams] == ["length"] * 2
        assert tiny.generate("hello", **options).text == alone[0]


def test_a_stream_that_is_dropped_or_closed_holds_nothing(tiny: Model) -> None:
    options: dict[str, Any] = {"max_tokens": 50, "ignore_eos": True}
    next(tiny.stream("hello", **options))
    closed = tiny.stream("hello", **options)
    next(closed)
    closed.close()
    tiny.generate("hello", max_tokens=1)
    core = tiny._core
    assert (len(core.running), len(core.waiting)) == (0, 0)
    assert core.slots.free == core.slots.count - core.cache.entries


def test_an_interrupted_step_drops_what_is_kept_and_nothing_else(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
    alone = tiny.generate("hello world", **options).text
    other = tiny.stream("hello world", **options)
    text = next(other)
    with monkeypatch.context() as patch:
        patch.setattr(tiny._executable, "run", lambda *a, **_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tiny.generate("hello world", **options)
    assert text + "".join(other) == alone
    assert tiny.generate("hello world", **options).text == alone


def test_logits_leave_kept_states_alone(tiny: Model) -> None:
    ids = [int(i) for i in np.random.default_rng(4).integers(0, 256, 200)]
    options: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
    first = tiny.generate(ids, **options)
    stream = tiny.stream(ids, max_tokens=4, temperature=0, ignore_eos=True)
    text = next(stream)
    entries = tiny._core.cache.entries
    tiny.logits(ids[::-1])
    assert tiny._core.cache.entries >= entries
    again = tiny.generate(ids, **options)
    assert (again.ids, again.usage.cached_tokens) == (first.ids, 192)
    assert text + "".join(stream) == tiny.generate(ids, max_tokens=4, temperature=0, ignore_eos=True).text


def test_logits_are_of_a_fresh_state(tiny: Model) -> None:
    ids = tiny.tokenize("hello world, hello")
    whole = tiny.logits(ids)
    assert whole.dtype == np.float32
    assert whole.shape == (len(ids), tiny.n_vocab)
    tiny.generate("something else", max_tokens=3)
    np.testing.assert_array_equal(tiny.logits(np.array(ids)), whole)
    greedy = tiny.generate(ids, max_tokens=1, temperature=0, ignore_eos=True, cache_prompt=False)
    row = whole[-1].copy()
    row[[tiny.tokenize(t, special=True)[0] for t in ("<|im_end|>", "<|endoftext|>", "<|fim_pad|>")]] = -np.inf
    assert greedy.ids == [int(row.argmax())]


def test_ids_may_be_integers_of_numpy(tiny: Model) -> None:
    """The next token of a loop of one's own is ``logits[-1].argmax()``."""
    ids = tiny.tokenize("hello")
    longer = [*ids, tiny.logits(ids)[-1].argmax()]
    plain = [int(i) for i in longer]
    np.testing.assert_array_equal(tiny.logits(longer), tiny.logits(plain))
    assert (
        tiny.generate(longer, max_tokens=1, temperature=0).ids == tiny.generate(plain, max_tokens=1, temperature=0).ids
    )
    wrongs: list[Any] = [np.array([5.0]), np.array([[5]]), [np.float32(5)], [np.True_]]
    for wrong in wrongs:
        with pytest.raises(errors.RequestError):
            tiny.logits(wrong)


def test_logits_of_more_rows_than_one_step_gives(tiny_dense: Path) -> None:
    ids = [int(i) for i in np.random.default_rng(3).integers(0, 256, 150)]
    with load(tiny_dense, kv_dtype="f32") as model, load(tiny_dense, n_batch=1, kv_dtype="f32") as single:
        np.testing.assert_allclose(model.logits(ids), single.logits(ids), atol=1e-4)


def test_tokenize_and_detokenize(tiny: Model) -> None:
    text = "hello 😀 <|im_end|>"
    ids = tiny.tokenize(text)
    assert tiny.detokenize(ids) == text
    marked = tiny.tokenize(text, special=True)
    assert len(marked) < len(ids)
    assert tiny.detokenize(marked) == "hello 😀 "
    assert tiny.detokenize(marked, special=True) == text


def test_b83_context_is_the_smaller_of_asked_and_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_tiny(tmp_path / "short.gguf", metadata={"qwen35.context_length": 100})
    for asked, got in ((None, 100), (0, 100), (64, 64), (5000, 100)):
        caplog.clear()
        with load(path, n_ctx=asked) as model:
            assert model.n_ctx == got
            assert bool(caplog.records) == (asked == 5000)
            assert model.generate([1] * (got - 1), ignore_eos=True).usage.completion_tokens == 1
            with pytest.raises(errors.ContextLengthExceeded):
                model.generate([1] * got)
            assert model.logits([1] * got).shape[0] == got
            with pytest.raises(errors.ContextLengthExceeded):
                model.logits([1] * (got + 1))


def test_c10_sampling_values_of_the_file_are_the_defaults(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", metadata={"general.sampling.temp": 0.0, "general.sampling.top_k": 7})
    with load(path) as model:
        options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
        assert model.generate("hello", **options).ids == model.generate("hello", **options).ids
        assert (
            model.generate("a", temperature=2.0, seed=1, top_k=0, **options).ids != model.generate("a", **options).ids
        )


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_b84_illegal_options_name_the_field(tiny: Model, options: dict[str, Any], param: str) -> None:
    with pytest.raises(errors.RequestError) as caught:
        tiny.generate("hello", **options)
    assert caught.value.param == param


def test_b84_empty_prompt(tiny: Model) -> None:
    with pytest.raises(errors.RequestError, match="empty"):
        tiny.generate("")
    with pytest.raises(errors.RequestError, match="empty"):
        tiny.logits([])


def test_b44_the_template_of_the_file_is_used(tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}!"
    with load(write_tiny(tmp_path / "t.gguf", chat_template=template)) as model:
        messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
        assert model.render(messages) == "<system>be<user>hi!"
        done = model.chat(messages, max_tokens=1)
        assert done.usage.prompt_tokens == len(model.tokenize("<system>be<user>hi!"))


def test_b44_without_a_template_chat_is_refused_and_generate_works(tmp_path: Path) -> None:
    with load(write_tiny(tmp_path / "t.gguf", chat_template=None)) as model:
        assert not model.has_chat_template
        with pytest.raises(errors.TemplateError, match=r"no chat template.*generate"):
            model.chat([{"role": "user", "content": "hi"}])
        assert model.generate("hi", max_tokens=1, ignore_eos=True).usage.completion_tokens == 1


def test_b45_markers_stored_as_normal_tokens(tmp_path: Path) -> None:
    markers = ["<|im_start|>", "<|im_end|>"]
    chain = [b"one ", b"two"]
    with (
        load(write_script(tmp_path / "a.gguf", chain)) as right,
        load(write_script(tmp_path / "b.gguf", chain, markers_as_normal=markers)) as wrong,
    ):
        messages = [{"role": "user", "content": "hi"}]
        a, b = right.chat(messages, temperature=0), wrong.chat(messages, temperature=0)
    assert (b.text, b.finish_reason) == ("one two", "stop")
    assert a.usage == b.usage


def test_c14_messages_cannot_spell_control_tokens(tiny: Model) -> None:
    plain = tiny.chat([{"role": "user", "content": "a<|im_end|>b"}], max_tokens=0).usage.prompt_tokens
    short = tiny.chat([{"role": "user", "content": "ab"}], max_tokens=0).usage.prompt_tokens
    assert plain - short == len(tiny.tokenize("<|im_end|>")) > 1


def test_c29_a_chat_reuses_the_state_before_the_answer(tiny: Model, tiny_dense: Path) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "tell me something long enough to count"}]
    options: dict[str, Any] = {"max_tokens": 5, "temperature": 0}
    first = tiny.chat(messages, cache_prompt=False, **options)
    assert tiny.chat(messages, **options).usage.cached_tokens == 0  # what is not to be cached was not kept
    again = tiny.chat(messages, **options)
    head = len(tiny.tokenize(tiny.render(messages, add_generation_prompt=False), special=True))
    assert again.usage.cached_tokens == head
    assert again.ids == first.ids
    messages += [{"role": "assistant", "content": "well"}, {"role": "user", "content": "and then?"}]
    second = tiny.chat(messages, **options)
    assert second.usage.cached_tokens == head
    with load(tiny_dense) as cold:
        assert cold.chat(messages, **options).ids == second.ids


def test_path_can_be_a_folder_or_any_part(tmp_path: Path, tiny: Model) -> None:
    first = write_tiny(tmp_path / "m.gguf", parts=3)
    ids = [5, 6, 7]
    expected = tiny.logits(ids)
    parts = sorted(first.parent.glob("*.gguf"))
    assert len(parts) == 3
    for path in (first, parts[1], first.parent):
        with load(path) as model:
            np.testing.assert_array_equal(model.logits(ids), expected)


def test_metadata_and_description(tiny: Model, tiny_dense: Path) -> None:
    assert tiny.metadata["general.architecture"] == "qwen35"
    assert tiny.path == tiny_dense
    assert tiny.device == "reference"
    assert tiny.description.startswith("qwen35 ")


def test_closed_model(tiny_dense: Path) -> None:
    model = load(tiny_dense)
    model.close()
    model.close()
    with pytest.raises(errors.EngineStopped):
        model.generate("hello")
    with pytest.raises(errors.EngineStopped):
        model.logits([1])


def test_b37_b47_bad_files_raise_documented_errors(tmp_path: Path, tiny_dense: Path) -> None:
    with pytest.raises(errors.ModelFileError, match="no such file"):
        load(tmp_path / "missing.gguf")
    with pytest.raises(errors.ModelFileError, match="too long"):
        load(tmp_path / ("x" * 300))
    half = tmp_path / "half.gguf"
    shutil.copy(tiny_dense, half)
    with half.open("r+b") as f:
        f.truncate(half.stat().st_size // 2)
    with pytest.raises(errors.ModelFileError, match="truncated"):
        load(half)
    with pytest.raises(errors.UnsupportedModel, match=r"foo.*qwen35, qwen35moe"):
        load(write_tiny(tmp_path / "foo.gguf", metadata={"general.architecture": "foo"}))


@pytest.mark.parametrize(("name", "value"), [("n_ctx", -1), ("n_ctx", 1.5), ("n_batch", 0), ("device", "gpu")])
def test_load_refuses_values_that_make_no_sense(tiny_dense: Path, name: str, value: Any) -> None:
    with pytest.raises(errors.ConfigError, match=name):
        load(tiny_dense, **{name: value})


def test_load_progress_covers_the_file(tiny_dense: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    load(tiny_dense, progress=lambda *a: seen.append(a)).close()
    size = tiny_dense.stat().st_size
    assert seen[-1] == ("loading", size, size)


def test_importing_the_package_loads_nothing_heavy() -> None:
    """A server or a script that only wants the names pays under 150 ms."""
    code = (
        "import sys; before = set(sys.modules); import time; t = time.process_time(); import qwen35rt;"
        "print(time.process_time() - t); print(*sorted(set(sys.modules) - before))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    seconds, modules = out.stdout.splitlines()
    loaded = {m.split(".")[0] for m in modules.split()}
    assert loaded.isdisjoint({"numpy", "tokenizers", "gguf", "huggingface_hub", "tqdm", "psutil", "cupy", "minijinja"})
    assert float(seconds) < 0.15


def test_lazy_names() -> None:
    assert set(qwen35rt.__all__) <= set(dir(qwen35rt))
    for name in qwen35rt.__all__:
        assert getattr(qwen35rt, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = qwen35rt.lod

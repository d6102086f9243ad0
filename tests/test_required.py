"""Faults of tests_required.md on the CPU backend: numbers, formats, splits, tied and MTP models (B25 to B43)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import qwen35rt
from qwen35rt import errors
from qwen35rt.backends.base import Backend, KvType
from qwen35rt.backends.reference import ReferenceBackend
from qwen35rt.formats import BY_NAME
from qwen35rt.model.program import Program
from qwen35rt.model.source import open_source

from .fixtures import Float, TinySpec, tiny_tensors, write_gguf, write_tiny
from .gguf_raw import quantize
from .implementations import cpu_backend, isa_levels
from .oracle import compiled, every, in_steps, int8_rows, rounded_activations, step

Array = npt.NDArray[Any]
LEVELS = isa_levels()

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled module qwen35rt._native is not built")
every_level = pytest.mark.parametrize("isa", LEVELS or ("none",))
every_kind = pytest.mark.parametrize("kind", ["dense", "moe"])
load = partial(qwen35rt.load, device="cpu")


@pytest.fixture(autouse=True)
def _best_level(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QWEN35RT_ISA", "QWEN35RT_THREADS"):
        monkeypatch.delenv(name, raising=False)


def random_ids(n: int, seed: int = 25) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 256, n)]


def logits_of(backend: Backend, program: Program, ids: list[int]) -> Array:
    exe = compiled(backend, program)
    out = step(exe, np.array(ids), 0, len(ids))[0]
    exe.close()
    return out


def greedy(path: Path, prompt: str = "hello world, the rain", n: int = 16) -> list[int]:
    with load(path) as model:
        return model.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True).ids


# ------------------------------------------------------------------------------------------ B25, B27, B29, B31


@every_level
@every_kind
def test_b25_logits_of_20_tokens(tmp_path: Path, kind: str, isa: str) -> None:
    """Every tensor random and different, the embedding in Q8_0: within 1e-3 of float64 with keys and values in float32;
    what storing them in float16 costs is bounded apart."""
    path = write_tiny(tmp_path / "t.gguf", kind, formats={"token_embd*": "Q8_0"})
    ids, program = random_ids(20), open_source(path).program
    want = logits_of(ReferenceBackend(np.float64), program, ids)
    bounds: dict[KvType, float] = {"f32": 1e-3, "f16": 5e-3}
    for kv_dtype, bound in bounds.items():
        with load(path, isa=isa, kv_dtype=kv_dtype) as model:
            assert np.abs(model.logits(ids) - want).max() < bound, kv_dtype


@every_kind
def test_b25_extra_tensor_warns_and_missing_one_is_an_error(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    ids = random_ids(20)
    plain, more = tmp_path / "plain.gguf", tmp_path / "more.gguf"
    with load(write_tiny(plain, kind)) as model:
        want = model.logits(ids)
    assert not caplog.records
    with load(write_tiny(more, kind, extra={"blk.1.mystery.weight": np.ones((4, 64), np.float32)})) as model:
        np.testing.assert_array_equal(model.logits(ids), want)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "blk.1.mystery.weight" in caplog.text
    names = {
        "dense": ["blk.2.ssm_alpha.weight"],
        "moe": ["blk.0.ffn_gate_inp.weight", "blk.3.ffn_gate_inp_shexp.weight"],
    }
    for name in ["blk.3.attn_k_norm.weight", *names[kind]]:
        with pytest.raises(errors.ModelFileError, match=f"tensor '{name}' is missing"):
            load(write_tiny(tmp_path / "less.gguf", kind, drop=[name]))


@every_level
@pytest.mark.parametrize("bias", [None, 10.0])
def test_b27_one_pass_equals_steps_and_chunks(tmp_path: Path, bias: float | None, isa: str) -> None:
    """TINY-D, decay as drawn, and near 0 and near 1 in turn (dt bias +-10)."""

    def spread(values: Float) -> Float:
        return values if bias is None else np.where(np.arange(values.size) % 2, bias, -bias).astype(np.float32)

    program = open_source(write_tiny(tmp_path / "t.gguf", overrides={"*ssm_dt.bias": spread})).program
    exe, tokens = compiled(cpu_backend(isa), program), np.array(random_ids(200, 27))
    single = in_steps(exe, tokens, every(1, 200))
    assert np.isfinite(single).all()
    for chunk in (7, 64, 100):
        assert np.abs(in_steps(exe, tokens, every(chunk, 200)) - single).max() < 1e-4, f"chunks of {chunk}"
    for length in (1, 2, 3, 4, 63, 64, 65, 127, 128, 129, 200):
        assert np.abs(in_steps(exe, tokens, [length]) - single[:length]).max() < 1e-4, f"T = {length}"
    exe.close()


def _inf(values: Float) -> Float:
    values[3, 5] = np.inf
    return values


def _nan_scale() -> dict[str, Any]:
    name = "blk.3.ffn_down.weight"
    blocks = quantize(tiny_tensors(TinySpec())[name], "Q8_0", np.random.default_rng(29)).copy()
    blocks[7, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    return {name: (blocks, "Q8_0")}


@every_level
@pytest.mark.parametrize(
    "fault",
    [{"overrides": {"blk.3.ffn_down.weight": _inf}}, {"extra": _nan_scale()}],
    ids=["inf in ffn_down", "nan in a quant scale"],
)
def test_b29_not_finite_is_an_error_and_the_next_model_is_sound(
    tmp_path: Path, tiny_dense: Path, fault: dict[str, Any], isa: str
) -> None:
    with load(tiny_dense, isa=isa) as model:
        want = model.generate("hello", max_tokens=8, temperature=0, ignore_eos=True).ids
    with load(write_tiny(tmp_path / "bad.gguf", **fault), isa=isa) as bad, load(tiny_dense, isa=isa) as model:
        for temperature in (0, 1):
            with pytest.raises(errors.GenerationFailed, match=r"not finite.* state dropped"):
                bad.generate("hello", max_tokens=50, temperature=temperature)
        assert model.generate("hello", max_tokens=8, temperature=0, ignore_eos=True).ids == want


@every_level
def test_b29_the_next_generation_of_the_same_model_is_sound(tmp_path: Path, isa: str) -> None:
    def spoil(values: Float) -> Float:
        values[ord("z") - 33] = np.nan  # bytes lie in the order of their letters, '!' first
        return values

    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with load(write_tiny(tmp_path / "nan.gguf", overrides={"token_embd.weight": spoil}), isa=isa) as model:
        good = model.generate("hello", **options)
        with pytest.raises(errors.GenerationFailed):
            model.generate("hello z", **options)
        again = model.generate("hello", **options)
    assert (again.ids, again.usage.cached_tokens) == (good.ids, 0)


MIX = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_NL")
WIDE: dict[str, Any] = {"n_embd": 256, "n_ff": 256, "head_dim": 128, "ssm_state": 64}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY-D of 256 columns whose neighbouring matrices differ in type."""
    matrices = [n for n, t in tiny_tensors(TinySpec(**WIDE)).items() if t.ndim == 2 and "conv1d" not in n]
    formats = {n: MIX[i % len(MIX)] for i, n in enumerate(matrices)}
    formats |= {n: "Q8_0" for n in matrices if "ssm_alpha" in n or "ssm_beta" in n}
    assert set(formats.values()) == set(MIX)
    return write_tiny(tmp_path_factory.mktemp("mix") / "mix.gguf", formats=formats, **WIDE)


@pytest.fixture(scope="module")
def mixed_logits(mixed: Path) -> Mapping[str, Array]:
    """Of 60 tokens: float64, float32, and float32 with activations rounded to int8."""
    ids, program = random_ids(60, 31), open_source(mixed).program
    with rounded_activations():
        rounded = logits_of(ReferenceBackend(np.float32), program, ids)
    return {
        "exact": logits_of(ReferenceBackend(np.float64), program, ids),
        "plain": logits_of(ReferenceBackend(np.float32), program, ids),
        "rounded": rounded,
    }


@every_level
def test_b31_types_mix_per_tensor(mixed: Path, mixed_logits: Mapping[str, Array], isa: str) -> None:
    exact = mixed_logits["exact"]
    assert np.abs(mixed_logits["plain"] - exact).max() < 1e-3
    with load(mixed, isa=isa) as model:
        got = model.logits(random_ids(60, 31))
    bound = 1.2 * np.abs(mixed_logits["rounded"] - exact).mean()
    assert 1e-3 < bound < 0.2  # logits have a standard deviation of 3.5
    assert np.abs(got - exact).mean() <= bound


def test_b31_k_quant_with_96_columns_is_refused(tmp_path: Path) -> None:
    path, name = write_tiny(tmp_path / "t.gguf"), "blk.1.ffn_down.weight"  # n_ff is 96
    raw = bytearray(path.read_bytes())
    at = raw.index(name.encode()) + len(name) + 4 + 2 * 8  # behind the number of dimensions and both of them
    raw[at : at + 4] = BY_NAME["Q4_K"].id.to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(errors.ModelFileError, match=rf"'{name}' is Q4_K with rows of 96 elements.* multiple of 256"):
        load(path)


# ------------------------------------------------------------------------------------------ B40: split files


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    (tmp_path / "m").mkdir()
    first = write_tiny(tmp_path / "m" / "tiny.gguf", parts=3)
    return [first.with_name(f"tiny-{i:05d}-of-00003.gguf") for i in (1, 2, 3)]


@pytest.fixture(scope="module")
def whole_logits(tiny_dense: Path) -> Iterator[Float]:
    with load(tiny_dense) as model:
        yield model.logits(random_ids(20))


def test_b40_part_1_part_2_and_the_folder_give_the_logits_of_one_file(parts: list[Path], whole_logits: Float) -> None:
    for path in (parts[0], parts[1], parts[0].parent):
        with load(path) as model:
            np.testing.assert_array_equal(model.logits(random_ids(20)), whole_logits)


def test_b40_first_part_without_tensors(tmp_path: Path, tiny_dense: Path, whole_logits: Float) -> None:
    meta = dict(open_source(tiny_dense).file.metadata)
    first = write_gguf(tmp_path / "e.gguf", meta, tiny_tensors(TinySpec()), parts=3, empty_first=True)
    with load(first) as model:
        np.testing.assert_array_equal(model.logits(random_ids(20)), whole_logits)


def test_b40_faults_name_the_part(parts: list[Path]) -> None:
    second, third = (p.read_bytes() for p in parts[1:])
    parts[2].unlink()
    with pytest.raises(errors.ModelFileError, match=r"missing.*tiny-00003-of-00003\.gguf"):
        load(parts[0])
    shutil.copy(parts[1], parts[2])
    with pytest.raises(errors.ModelFileError, match=r"tiny-00003-of-00003\.gguf: holds part 2 "):
        load(parts[0])
    parts[2].write_bytes(third)
    at = second.index(b"split.count") + len("split.count") + 4
    parts[1].write_bytes(second[:at] + (4).to_bytes(2, "little") + second[at + 2 :])
    with pytest.raises(errors.ModelFileError, match=r"tiny-00002-of-00003\.gguf: key 'split.count' is 4"):
        load(parts[0])


# ------------------------------------------------------------------------------------------ B42, B43


@every_kind
def test_b42_mtp_off_gives_the_tokens_of_the_trunk(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    plain, mtp = (write_tiny(tmp_path / f"{m}.gguf", kind, mtp=m) for m in (False, True))
    assert greedy(mtp) == greedy(plain)
    with load(plain) as a, load(mtp) as b:
        np.testing.assert_array_equal(a.logits(random_ids(20)), b.logits(random_ids(20)))
    assert not caplog.records


def test_b42_stated_mtp_tensors_that_are_absent(
    tmp_path: Path, tiny_dense: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meta = {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": 5}
    assert greedy(write_tiny(tmp_path / "t.gguf", metadata=meta)) == greedy(tiny_dense)
    assert "MTP is off" in caplog.text


def test_b42_two_mtp_blocks_are_refused_clearly(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "t.gguf", mtp=True, metadata={"qwen35.nextn_predict_layers": 2})
    with pytest.raises(errors.UnsupportedModel, match=r"nextn_predict_layers' is 2; .*more than one MTP block"):
        load(path)


@every_level
@pytest.mark.parametrize("form", ["F32", "Q6_K"])
def test_b43_tied_logits_are_embedding_times_hidden(tmp_path: Path, form: str, isa: str) -> None:
    """Memory: test_required_memory."""
    path = write_tiny(tmp_path / "t.gguf", tied=True, formats={"token_embd*": form}, **WIDE)
    source, ids = open_source(path), random_ids(20)
    exe = compiled(cpu_backend(isa), source.program)
    logits, values = step(exe, np.array(ids), 0, len(ids), ["output_norm"])
    exe.close()
    hidden = values["output_norm"].astype(np.float64)
    table = next(op for op in source.program.ops if op.kind == "embed").weights[0]
    want = (int8_rows(hidden) if form == "Q6_K" else hidden) @ table.dequantize().T.astype(np.float64)
    assert np.abs(logits - want).max() < (2e-2 if form == "Q6_K" else 1e-3)
    with load(path, isa=isa, kv_dtype="f32") as model:
        np.testing.assert_allclose(model.logits(ids), logits, atol=1e-4)


# ------------------------------------------------------------------------------------------ B88: levels


@every_level
def test_b88_every_level_gives_the_same_tokens_with_experts(tiny_moe: Path, isa: str) -> None:
    options: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    with load(tiny_moe, device="reference") as model:
        want = model.generate("hello world, the rain", **options).ids
    with load(tiny_moe, isa=isa) as model:
        assert model.generate("hello world, the rain", **options).ids == want

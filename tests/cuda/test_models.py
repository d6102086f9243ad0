"""Whole models on the CUDA backend in emulation: against the reference, in any steps, and against the oracle."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen35rt.backends.base import Backend, Batch, Executable, Limits
from qwen35rt.backends.cuda.backend import CudaBackend
from qwen35rt.backends.cuda.fusion import fuse
from qwen35rt.backends.cuda.lowering import Step
from qwen35rt.backends.cuda.sample import TopK
from qwen35rt.backends.reference import ReferenceBackend
from qwen35rt.formats import FORMATS
from qwen35rt.model.gguf_file import open_gguf
from qwen35rt.model.graph import build_program
from qwen35rt.model.hparams import read_hparams
from qwen35rt.model.program import Program
from qwen35rt.model.weights import load_weights
from tests import ahead
from tests.cuda_host import host
from tests.cuda_host.host import HostLauncher, compiler
from tests.engine.rig import check_best
from tests.oracle import (
    ALL_FILES,
    EXPERTS,
    compiled,
    golden,
    model,
    needs_oracle,
    prompt_logits,
    rounded_activations,
    step,
)

Array = npt.NDArray[Any]
LIMITS = Limits(64, 64, 6, 24, 16, "f32")

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to build the kernels for the CPU")


def begin_ahead(chosen: list[pytest.Function]) -> list[pytest.Function]:
    """Libraries that all models need, and those of a file of many formats."""
    if compiler() is None:
        return []
    mixed = any("mix" in item.callspec.params.values() for item in chosen if hasattr(item, "callspec"))
    if ahead.is_long():
        host.begin(host.of_all_models())
    host.begin(("linear", f.name) for f in FORMATS if mixed)
    return []


def _program(path: Path) -> Program:
    f = open_gguf(path)
    hp = read_hparams(f)
    return build_program(hp, load_weights(f, hp))


def _cuda(order: int = 0, tensor_cores: bool = False) -> Backend:
    """By default without tensor cores: bit for bit the same in any steps."""
    return CudaBackend(HostLauncher(order=order), tensor_cores=tensor_cores)


def _in_chunks(exe: Executable, tokens: Array, chunks: tuple[int, ...], slot: int = 0) -> Array:
    """Logits of all rows, in steps of so many."""
    pages, rows, at = np.arange(8, dtype=np.int32) + 8 * slot, [], 0
    for n in chunks:
        rows.append(exe.run(Batch.single(tokens[at : at + n], at, pages, slot, range(n)))[0].copy())
        at += n
    return np.concatenate(rows)


@pytest.mark.parametrize("kind", ["tiny_dense", "tiny_moe"])
def test_tiny_models_equal_the_reference_in_any_steps(kind: str, request: pytest.FixtureRequest) -> None:
    program = _program(request.getfixturevalue(kind))
    tokens = np.random.default_rng(6).integers(0, program.n_vocab, 40)
    exe, reference = _cuda().compile(program, LIMITS), ReferenceBackend().compile(program, LIMITS)
    quantised = any(w.format.quantized for op in program.ops for w in op.weights)
    with rounded_activations():
        want = _in_chunks(reference, tokens, (40,))
    whole = _in_chunks(exe, tokens, (40,))
    assert np.abs(whole - want).max() < 1e-3 * max(1.0, np.abs(want).max()) * (10 if quantised else 1)
    for chunks in ((1,) * 12 + (28,), (7, 1, 1, 30, 1)):
        np.testing.assert_array_equal(_in_chunks(exe, tokens, chunks), whole)
    exe.close()


@pytest.mark.parametrize("kind", ["tiny_dense", "tiny_moe"])
def test_sequences_of_one_step_do_not_touch_each_other(kind: str, request: pytest.FixtureRequest) -> None:
    """Prefill beside decode, and decode of three by a graph for four: bit for bit what each gives alone."""
    program = _program(request.getfixturevalue(kind))
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, program.n_vocab, (3, 20)).astype(np.int32)
    alone = [_in_chunks(_cuda().compile(program, LIMITS), t, (20,)) for t in tokens]
    exe = _cuda(order=3).compile(program, LIMITS)
    done = [0, 0, 0]
    for take in ((9, 0, 0), (1, 8, 1), (1, 1, 3), *[(1, 1, 1)] * 6, (3, 1, 1)):
        live = [s for s in range(3) if take[s]]
        at = np.concatenate([np.arange(done[s], done[s] + take[s]) for s in live])
        fields = (
            np.concatenate([tokens[s, done[s] : done[s] + take[s]] for s in live]),
            np.tile(at, (3, 1)),
            np.cumsum([0, *(take[s] for s in live)]),
            [done[s] for s in live],
            live,
            [range(8 * s, 8 * s + 8) for s in live],
            range(len(at)),
        )
        logits, report = exe.run(Batch(*(np.ascontiguousarray(f, np.int32) for f in fields)))
        want = np.concatenate([alone[s][done[s] : done[s] + take[s]] for s in live])
        np.testing.assert_array_equal(logits, want)
        assert report.devices == {"cuda": len(program.ops)}
        for s in live:
            done[s] += take[s]
    exe.close()


@pytest.mark.parametrize("kind", ["tiny_dense", "tiny_moe"])
def test_named_values_and_a_profile(kind: str, request: pytest.FixtureRequest) -> None:
    """Kept values are those of the reference; asking for them, which joins no ops, or for times changes no bit."""
    program = _program(request.getfixturevalue(kind))
    exe = CudaBackend(HostLauncher()).compile(program, LIMITS)
    batch = Batch.single([1, 2, 3], 0, np.arange(1, dtype=np.int32))
    plain = exe.run(batch)[0].copy()
    names = [v.name for v in program.values]
    logits, report = exe.run(batch, names)
    np.testing.assert_array_equal(logits, plain)
    with rounded_activations():
        want = ReferenceBackend().compile(program, LIMITS).run(batch, names)[1].values
    for name in names:
        scale = max(1.0, float(np.abs(want[name]).max()))
        assert np.abs(report.values[name] - want[name]).max() < 2e-2 * scale, name
    exe.profile = True
    logits, report = exe.run(batch)
    np.testing.assert_array_equal(logits, plain)
    assert set(report.op_seconds) == {node.op.kind for node in fuse(program, [program.logits, program.hidden])}
    exe.close()


@pytest.mark.parametrize("kind", ["tiny_dense", "tiny_moe"])
def test_c42_reports_count_the_ops_that_were_launched(kind: str, request: pytest.FixtureRequest) -> None:
    """Joined ones too, in a profile and by a graph; not those that have nothing to do, as nobody wants logits."""
    program = _program(request.getfixturevalue(kind))
    exe = CudaBackend(HostLauncher()).compile(program, LIMITS)
    pages = np.arange(1, dtype=np.int32)
    behind = sum(op.outs[0].gathered for op in program.ops if op.outs)
    assert behind == 3
    for at in range(4):  # the second step of a bucket captures its graph, the third replays it
        assert exe.run(Batch.single([7], at, pages))[1].devices == {"cuda": len(program.ops)}
    assert exe.run(Batch.single([7, 8], 4, pages, out_rows=()))[1].devices == {"cuda": len(program.ops) - behind}
    assert exe.run(Batch.single([7, 8], 6, pages), top=2)[1].devices == {"cuda": len(program.ops)}
    exe.profile = True
    assert exe.run(Batch.single([7, 8], 8, pages))[1].devices == {"cuda": len(program.ops)}
    exe.profile = False
    kind_of, ops, _ = exe._get_lowered(False).nodes[3]
    launches = [(k, n, () if i == 3 else go) for i, (k, n, go) in enumerate(exe._get_lowered(False).nodes)]
    exe._lowered[False] = replace(exe._get_lowered(False), nodes=tuple(launches))
    assert exe.run(Batch.single([7, 8], 10, pages))[1].devices == {"cuda": len(program.ops) - ops}, kind_of
    exe.close()


def test_the_largest_logits_after_a_step_array_that_grew(tiny_dense: Path) -> None:
    """The launches that look for them hold no old array, and find the same by the new one."""
    exe = CudaBackend(HostLauncher()).compile(_program(tiny_dense), LIMITS)
    batch = Batch.single([1, 2, 3], 0, np.arange(1, dtype=np.int32))
    logits = exe.run(batch)[0].copy()
    check_best(exe.run(batch, top=4)[0], logits, 4)
    old = weakref.ref(exe._step), weakref.ref(exe._tops[4])
    wide = np.full((1, 10_000), -1, np.int32)
    wide[0, 0] = 0
    for pages in (wide, np.arange(1, dtype=np.int32)):
        check_best(exe.run(replace(batch, pages=pages.reshape(1, -1)), top=4)[0], logits, 4)
    assert [ref() for ref in old] == [None, None]
    exe.close()


def test_the_graph_of_a_step_finds_its_largest_logits(tiny_dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each number of them that is asked for; replays launch nothing beside it."""
    program, pages = _program(tiny_dense), np.arange(1, dtype=np.int32)
    exe, eager = (CudaBackend(HostLauncher(), graphs=graphs).compile(program, LIMITS) for graphs in (True, False))
    launched: list[int] = []
    go = TopK.go

    def counted(top: TopK, step: Step) -> None:
        launched.append(step.rows)
        go(top, step)

    monkeypatch.setattr(TopK, "go", counted)
    for at in range(9):
        batch, top = Batch.single([at + 5], at, pages), (4, 0, 7)[at % 3]
        want = eager.run(batch)[0]
        if top:
            check_best(exe.run(batch, top=top)[0], want, top)
        else:
            np.testing.assert_array_equal(exe.run(batch)[0], want)
        # Of each number the first step launches, the second captures.
        assert len(launched) == (1, 1, 2, 3, 3, 4, 4, 4, 4)[at]
    for each in (exe, eager):
        each.close()


# ------------------------------------------------------------------------------------------ oracle


OFTEN = (("nano", "f32"), ("dense", "mix"), ("moe", "bf16"))


@needs_oracle
@pytest.mark.parametrize(
    ("name", "variant"), [f if f in OFTEN else pytest.param(*f, marks=pytest.mark.long) for f in ALL_FILES]
)
def test_logits_of_the_oracle(name: str, variant: str) -> None:
    """B25, B31: within 1e-3 of HF where activations are not rounded; else as near as the reference with rounding."""
    m = model(name, variant)
    names = ["p9", "text", "mm"]
    # Tiles of 22 formats, which a dense.mix has, take the compiler long.
    exe = compiled(_cuda(tensor_cores=variant != "mix"), m.program, 64)
    got = np.concatenate([prompt_logits(exe, name, p) for p in names])
    exe.close()
    want = np.concatenate([golden(name)[f"hf.{variant}.{p}"] for p in names])
    if variant in ("f32", "f16", "bf16"):
        assert np.abs(got - want).max() < 1e-3
        return
    reference = compiled(ReferenceBackend(), m.program, 64)
    with rounded_activations():
        rounded = np.concatenate([prompt_logits(reference, name, p) for p in names])
    factor = 2.0 if name in EXPERTS else 1.2
    assert np.abs(got - want).mean() <= factor * np.abs(rounded - want).mean()


@needs_oracle
@pytest.mark.parametrize("name", ["nano", "moe"])
def test_state_and_greedy_tokens_of_the_oracle(name: str) -> None:
    """The 24 greedy tokens of HF, one row a step: from the second step of a bucket on by its graph."""
    z, variant = golden(name), {"nano": "f32", "moe": "bf16"}[name]
    exe = compiled(_cuda(), model(name, variant).program, 256)
    tokens, begin = z["greedy.prompt"].tolist(), 0
    for _ in z["greedy.tokens"]:
        logits, _ = step(exe, np.array(tokens), begin, len(tokens))
        begin = len(tokens)
        tokens.append(int(logits[-1].argmax()))
    assert tokens[len(z["greedy.prompt"]) :] == z["greedy.tokens"].tolist()
    exe.close()

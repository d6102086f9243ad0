"""A program whose first layers run on one backend and the others on another: bit for bit what one backend gives."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen35rt.backends.base import Backend, Batch, Executable, Limits
from qwen35rt.backends.cuda.backend import CudaBackend
from qwen35rt.backends.reference import ReferenceBackend
from qwen35rt.backends.split import SplitBackend, SplitExecutable
from qwen35rt.errors import BackendError
from qwen35rt.model.cut import cut_program
from qwen35rt.model.program import Program
from qwen35rt.model.source import open_source
from tests.cuda_host.host import HostLauncher, compiler
from tests.engine.rig import ANSWER, Rig, Spy, check_best, prompts_of
from tests.fixtures import write_tiny
from tests.implementations import cpu_backend, isa_levels

Array = npt.NDArray[Any]
LIMITS = Limits(rows=32, out_rows=8, slots=6, pages=24, page_tokens=16)
PAGES = np.arange(8, dtype=np.int32)
ALL: list[tuple[str, Backend]] = [("reference", ReferenceBackend())]
ALL += [("cpu", cpu_backend(level, threads=1)) for level in isa_levels()[-1:]]


@pytest.fixture(scope="module", params=["dense", "moe"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, every second one of attention."""
    folder = tmp_path_factory.mktemp("split")
    kinds = {"dense": (), "moe": ("moe",)}[request.param]
    return write_tiny(folder / "model.gguf", *kinds, interval=2)


@pytest.fixture(scope="module")
def program(path: Path) -> Program:
    return open_source(path).program


@pytest.fixture(params=ALL, ids=[name for name, _ in ALL])
def backend(request: pytest.FixtureRequest) -> Backend:
    made: Backend = request.param[1]
    return made


@pytest.fixture(params=[1, 2, 3])
def pair(request: pytest.FixtureRequest, program: Program, backend: Backend) -> Iterator[tuple[Executable, Executable]]:
    """The program whole and split behind so many layers."""
    whole, split = (b.compile(program, LIMITS) for b in (backend, SplitBackend(backend, backend, request.param)))
    yield whole, split
    whole.close()
    split.close()


def tokens_of(program: Program, n: int, seed: str) -> Array:
    return np.random.default_rng(zlib.crc32(seed.encode())).integers(0, program.n_vocab, n).astype(np.int32)


def test_any_steps_give_the_bits_of_one_backend(pair: tuple[Executable, Executable], program: Program) -> None:
    """Logits of some rows, none, and named values of both parts."""
    whole, split = pair
    ids = tokens_of(program, 60, "steps")
    names = [v.name for v in program.values]
    at = 0
    for n, outs, keep in (
        (30, (0, 7, 29), ()),
        (1, (0,), ()),
        (5, (), ()),
        (20, (19,), names),
        (1, (0,), ()),
        (3, (2,), ()),
    ):
        batch = Batch.single(ids[at : at + n], at, PAGES, out_rows=outs)
        (want, plain), (got, report) = whole.run(batch, keep), split.run(batch, keep)
        np.testing.assert_array_equal(got, want)
        assert list(report.values) == list(plain.values)
        for name, value in plain.values.items():
            np.testing.assert_array_equal(report.values[name], value, err_msg=name)
        assert (report.devices, report.rows) == ({"cpu": len(program.ops)}, n)
        at += n


def test_the_largest_logits_and_whole_rows_are_those_of_the_upper_part(
    pair: tuple[Executable, Executable], program: Program
) -> None:
    whole, split = pair
    assert isinstance(split, SplitExecutable)
    spy = split._above = Spy(split._above)
    spy.only_best = True
    batch = Batch.single(tokens_of(program, 9, "best"), 0, PAGES, out_rows=(2, 8))
    want = whole.run(batch)[0].copy()
    np.testing.assert_array_equal(whole.run(batch, top=3)[0], want)  # here all logits are at hand
    check_best(split.run(batch, top=3)[0], want, 3)
    for exe in pair:
        np.testing.assert_array_equal([exe.full_logits(row) for row in (0, 1)], want)
        with pytest.raises(BackendError, match="row 2 is not one of the 2 rows"):
            exe.full_logits(2)


def test_states_and_pages_are_both_halves(pair: tuple[Executable, Executable], program: Program) -> None:
    """Sequences side by side, saved states, a shared source, copies of slots and pages, a state put back."""
    ids = tokens_of(program, 40, "states")
    found = []
    for exe in pair:
        logits = [exe.run(Batch.single(ids[:20], 0, PAGES, saves=[(9, 1), (15, 2)]))[0].copy()]
        exe.copy_page(0, 8)
        exe.copy_slot(2, 3)
        exe.copy_page(1, 9)  # tokens 16 to 19 are written again below
        both = Batch(
            *(
                np.ascontiguousarray(f, np.int32)
                for f in (
                    [*ids[16:20], *ids[30:33]],
                    np.tile([*range(16, 20), *range(10, 13)], (3, 1)),
                    [0, 4, 7],
                    [16, 10],
                    [4, 5],
                    [[8, 9, 10], [0, 11, 12]],
                    [3, 6],
                    [3, 1],
                )
            )
        )
        # The second sequence goes on in page 0 from token 10 on, which nobody reads any more.
        logits.append(exe.run(both)[0].copy())
        delta, conv = exe.read_slot(4)
        exe.write_slot(0, delta, conv)
        logits.append(exe.run(Batch.single(ids[20:22], 20, np.array([8, 9], np.int32)))[0].copy())
        found.append((logits, delta, conv, [exe.read_slot(i) for i in range(6)], exe.state_bytes, exe.page_bytes))
    np.testing.assert_equal(found[1], found[0])
    assert found[0][1].shape[0] == program.state.delta_layers == 2
    assert np.abs(found[0][1]).max() > 0


def test_faults_are_those_of_one_backend(pair: tuple[Executable, Executable], program: Program) -> None:
    good = Batch.single([1, 2], 0, PAGES)
    for exe in pair:
        for bad in (
            Batch.single([program.n_vocab], 0, PAGES),
            Batch.single([1, 2], 0, PAGES, out_rows=[2]),
            Batch.single([1], 0, PAGES, slot=6),
            Batch.single(range(33), 0, PAGES),
        ):
            with pytest.raises(BackendError):
                exe.run(bad)
        with pytest.raises(BackendError, match="named 'l9"):
            exe.run(good, ["l0.out", "l9.out"])
        for call, args in ((exe.copy_slot, (0, 6)), (exe.copy_page, (24, 0)), (exe.read_slot, (-1,))):
            with pytest.raises(BackendError):
                call(*args)
        delta, conv = exe.read_slot(0)
        for states in ((delta[:1], conv), (delta, conv[:, :1])):
            with pytest.raises(BackendError):
                exe.write_slot(0, *states)


def test_a_cut_has_layers_on_both_sides(program: Program) -> None:
    assert len(program.residuals) == 4
    for layers in (-1, 0, 4, 5):
        with pytest.raises(ValueError, match="4 layers cannot be cut"):
            cut_program(program, layers, 8)
    cut = cut_program(program, 3, 8)
    assert (cut.below.state.delta_layers, cut.below.state.attention_layers) == (2, 1)
    assert (cut.above.state.delta_layers, cut.above.state.attention_layers) == (0, 1)
    for part in (cut.below, cut.above):
        assert [v.id for v in part.values] == list(range(len(part.values)))
    assert len(cut.below.ops) + len(cut.above.ops) == len(program.ops) + 2
    weights = [w for op in (*cut.below.ops, *cut.above.ops[1:]) for w in op.weights]
    assert sorted(map(id, weights)) == sorted(id(w) for op in program.ops for w in op.weights)


class Broken(ReferenceBackend):
    """Cannot compile."""

    def compile(self, program: Program, limits: Limits) -> Any:
        raise BackendError("no memory")


def test_what_was_compiled_is_closed_if_the_rest_cannot_be(program: Program) -> None:
    closed = []

    class Below(ReferenceBackend):
        def compile(self, program: Program, limits: Limits) -> Any:
            exe: Any = super().compile(program, limits)
            exe.close = lambda: closed.append(exe)
            return exe

    with pytest.raises(BackendError, match="no memory"):
        SplitBackend(Below(), Broken(), 2).compile(program, LIMITS)
    assert len(closed) == 1


def test_an_engine_gives_the_tokens_of_one_backend(path: Path, backend: Backend) -> None:
    """Several turns at once, prefill in slices, kept states that later prompts go on from."""
    prompts = prompts_of([3, 40, 17, 64])
    found = []
    for used in (backend, SplitBackend(backend, backend, 2)):
        rig = Rig(path, backend=used, parallel=3, rows=16)
        first = rig.finish(*[rig.add(p, **ANSWER) for p in prompts])
        again = rig.finish(*[rig.add([*p, 5, 6], **ANSWER) for p in prompts])
        assert sum(c.usage.cached_tokens for c in again) > 60
        found.append([c.ids for c in (*first, *again)])
        assert not any(c.on_gpu for c in first)
        rig.check_all_returned()
    assert found[0] == found[1]


@pytest.mark.skipif(compiler() is None, reason="no g++ to build the kernels for the CPU")
@pytest.mark.parametrize("layers", [1, 3])
def test_c42_a_part_on_a_gpu_is_not_on_gpu(tiny_dense: Path, layers: int) -> None:
    """In emulation: the numbers of both devices, and a report that counts the ops of each."""
    program = open_source(tiny_dense).program
    above = ALL[-1][1]
    split = SplitBackend(CudaBackend(HostLauncher()), above, layers)
    assert split.name == f"cuda+{above.name}"
    exe, whole = split.compile(program, LIMITS), above.compile(program, LIMITS)
    assert isinstance(exe, SplitExecutable)
    ids = tokens_of(program, 20, "gpu")
    scale = 0.0
    for begin, n in ((0, 17), (17, 1), (18, 1), (19, 1)):
        batch = Batch.single(ids[begin : begin + n], begin, PAGES)
        (got, report), want = exe.run(batch), whole.run(batch)[0]
        scale = max(scale, float(np.abs(want).max()))
        assert np.abs(got - want).max() < 1e-3 * scale
        end = 1 + next(i for i, op in enumerate(program.ops) if program.residuals[layers - 1] in op.outs)
        assert report.devices == {"cuda": end, "cpu": len(program.ops) - end}
        assert not report.on_gpu
    delta, conv = exe.read_slot(0)
    exe.write_slot(1, delta, conv)
    np.testing.assert_equal(exe.read_slot(1), (delta, conv))
    exe.copy_page(0, 3)
    exe.copy_slot(1, 2)
    exe.close()
    whole.close()

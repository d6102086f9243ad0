"""Recurrent states kept in the middle of a step, read from other slots, copied and put back; pages copied.

Whatever a step saves must be what a step that ends there would have left: bit for bit on CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen35rt.backends.base import Batch, Executable, Int, KvType, Limits
from qwen35rt.errors import BackendError
from qwen35rt.model.program import Program, StateShape
from tests.implementations import Implementation, implementations

from .case import Inputs, attention_program
from .tensors import random_tensor

Array = npt.NDArray[Any]
State = tuple[Array, Array]
Check = Callable[[Array, Array], None]
VOCAB = 50
PREFIXES = (7, 18)  # tokens of the states that sequences go on from, in slots 0 and 1
SLOTS, PAGES, PAGE_TOKENS = 24, 9, 64
PAGES_EACH = PAGES // 3
LIMITS = Limits(400, 400, SLOTS, PAGES, PAGE_TOKENS)
SHAPES = {"even": (2, 32, 4), "odd": (3, 20, 4), "two-taps": (1, 16, 2)}  # heads, d, taps


def _ints(*numbers: int) -> Int:
    return np.array(numbers, np.int32)


def _draw(rng: np.random.Generator, n: int) -> Int:
    """Random tokens."""
    return rng.integers(0, VOCAB, n, np.int32)


def _recurrent(heads: int, d: int, taps: int) -> Program:
    """Two layers of convolution and delta rule, the second one fed by the first."""
    i = Inputs(f"recurrent {heads} {d} {taps}", VOCAB)
    channels, b = heads * d + 5, i.b
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in i.rng.normal(size=(2, VOCAB, heads, d)))
    queries, keys = i.value(q / math.sqrt(d)).view(heads, d), i.value(k).view(heads, d)
    x = i.normal(channels)
    for layer in range(2):
        b.scope(f"l{layer}.")
        w = i.rng.normal(size=(channels, taps)).astype(np.float32)
        v = b.conv1d_silu(x, w, layer, "conv")
        decays = -np.exp(i.rng.uniform(-8, 1, (VOCAB, heads)))
        gates = i.value(np.concatenate([decays, i.rng.uniform(0, 1, (VOCAB, heads))], 1))
        x = b.delta_net(queries, keys, v.view(heads, d), gates, layer, "delta")
        if layer == 0:
            x = b.linear(x, random_tensor(i.rng, "w", "F32", channels, heads * d), "mixed")
    wanted = b.gather_rows(x, "wanted")
    return Program(tuple(b.ops), tuple(b.values), x, wanted, StateShape(0, 1, 16, 2, heads, d, channels, taps), VOCAB)


@dataclass(frozen=True)
class Part:
    """One sequence of the step: the prefix that it goes on from (-1: none), its tokens, where its state goes, and its
    saves (row of its own, slot)."""

    prefix: int
    tokens: Int
    slot: int
    saves: tuple[tuple[int, int], ...]

    @property
    def start(self) -> int:
        return PREFIXES[self.prefix] if self.prefix >= 0 else 0


def _parts(rng: np.random.Generator, single: bool) -> list[Part]:
    """Three sequences of 1 to 130 rows. A state that only one of them goes on from may be replaced by it."""
    free = iter(rng.permutation(np.arange(len(PREFIXES), SLOTS)).tolist())
    prefixes = rng.integers(-1, len(PREFIXES), 3).tolist()
    made = []
    for s, prefix in enumerate(prefixes):
        n = 1 if single else int(rng.integers(1, 131))
        rows = np.flatnonzero(rng.permutation(n) < rng.integers(0, 6))
        if s == 1:
            rows = np.union1d(rows, n - 1)  # equal to the final state
        in_place = prefix >= 0 and prefixes.count(prefix) == 1 and rng.integers(2)
        slot = prefix if in_place else next(free)
        made.append(Part(prefix, _draw(rng, n), slot, tuple((int(r), next(free)) for r in rows)))
    return made


def _batch(parts: list[Part], saves: bool) -> Batch:
    lengths = [len(p.tokens) for p in parts]
    offsets = np.cumsum((0, *lengths))
    kept = [(at + row, slot) for at, p in zip(offsets, parts, strict=False) for row, slot in p.saves if saves]
    fields: tuple[Any, ...] = (
        np.concatenate([p.tokens for p in parts]),
        np.broadcast_to(np.concatenate([np.arange(p.start, p.start + len(p.tokens)) for p in parts]), (3, offsets[-1])),
        offsets,
        [p.start for p in parts],
        [p.slot for p in parts],
        np.arange(len(parts) * PAGES_EACH).reshape(len(parts), -1),
        np.arange(offsets[-1]),
        [p.prefix if p.prefix >= 0 else 0 for p in parts],
        [row for row, _ in kept],
        [slot for _, slot in kept],
    )
    return Batch(*(np.ascontiguousarray(f, np.int32) for f in fields))


def _in_steps(exe: Executable, part: Part, before: State) -> Iterator[tuple[Array, State]]:
    """Logits and state of each step, if steps end where the part saves and where it ends."""
    if part.prefix >= 0:
        exe.write_slot(0, *before)
    pages, at = _ints(*range(PAGES_EACH)), 0
    for end in sorted({row + 1 for row, _ in part.saves} | {len(part.tokens)}):
        logits, _ = exe.run(Batch.single(part.tokens[at:end], part.start + at, pages, out_rows=range(end - at)))
        yield logits.copy(), exe.read_slot(0)
        at = end


def _same(got: Array, want: Array) -> None:
    np.testing.assert_array_equal(got, want)


def _near(got: Array, want: Array) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * float(np.abs(want).max(initial=1)))


@pytest.fixture(params=implementations(), ids=str)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    made: Implementation = request.param
    return made


@pytest.fixture
def equal(implementation: Implementation) -> Check:
    """How results of different steps are compared: NumPy's products depend on the number of rows."""
    return _near if implementation.name == "reference" else _same


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(6))
def test_saved_states_are_those_of_steps_that_end_there(
    implementation: Implementation, equal: Check, shape: str, seed: int
) -> None:
    rng = np.random.default_rng([35, seed])
    program, parts = _recurrent(*SHAPES[shape]), _parts(rng, single=seed == 0)
    backend = implementation.make()
    exe, other = backend.compile(program, LIMITS), backend.compile(program, LIMITS)
    for slot in range(SLOTS):  # what slots hold beforehand must not matter
        dirt = [rng.normal(size=state.shape).astype(np.float32) for state in exe.read_slot(slot)]
        exe.write_slot(slot, dirt[0], dirt[1])
    for slot, n in enumerate(PREFIXES):
        exe.run(Batch.single(_draw(rng, n), 0, _ints(0), slot))
    before = [exe.read_slot(slot) for slot in range(SLOTS)]
    plain, _ = exe.run(_batch(parts, saves=False))
    plain = plain.copy()
    finals = [exe.read_slot(p.slot) for p in parts]
    for slot in range(SLOTS):
        exe.write_slot(slot, *before[slot])
    logits, _ = exe.run(_batch(parts, saves=True))
    _same(logits, plain)

    written, at = set(), 0
    for part, final in zip(parts, finals, strict=True):
        steps = list(_in_steps(other, part, before[part.prefix]))
        equal(logits[at : at + len(part.tokens)], np.concatenate([rows for rows, _ in steps]))
        saved = {slot: state for (_, slot), (_, state) in zip(part.saves, steps, strict=False)}
        for slot, want in (saved | {part.slot: steps[-1][1]}).items():
            for g, w in zip(exe.read_slot(slot), want, strict=True):
                equal(g, w)
        for g, w in zip(exe.read_slot(part.slot), final, strict=True):
            _same(g, w)
        written |= {part.slot, *saved}
        at += len(part.tokens)
    for slot in set(range(SLOTS)) - written:
        for g, w in zip(exe.read_slot(slot), before[slot], strict=True):
            _same(g, w)
    exe.close()
    other.close()


def test_parts_cover_what_the_test_names() -> None:
    """A shared source, a source replaced, a fresh sequence, a save at a last row and one before the taps are full."""
    drawn = [_parts(np.random.default_rng([35, seed]), single=seed == 0) for seed in range(6)]
    shared = [[p for p in parts if p.prefix >= 0] for parts in drawn]
    assert any(len({p.prefix for p in some}) < len(some) for some in shared)
    every = [p for parts in drawn for p in parts]
    assert any(p.slot == p.prefix for p in every)
    assert any(p.prefix < 0 and p.saves for p in every)
    rows = [row for p in every if p.prefix >= 0 for row, _ in p.saves]
    assert min(rows) < 2
    assert max(len(p.saves) for p in every) > 3
    assert all(parts[1].saves[-1][0] == len(parts[1].tokens) - 1 for parts in drawn)


# ------------------------------------------------------------------------------------------ pages


def _attentive() -> Program:
    """Two attention layers."""
    return attention_program("attentive", VOCAB, 4, 2, 16)


@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
def test_a_partly_filled_page_is_shared_by_copying_it(
    implementation: Implementation, equal: Check, kv_dtype: KvType
) -> None:
    """Two sequences go on from 20 tokens: page 3 is shared, of page 1, which holds 4 of them, each has its own."""
    rng = np.random.default_rng(16)
    prefix, ends = _draw(rng, 20), _draw(rng, 18).reshape(2, 9)
    backend, limits = implementation.make(), Limits(60, 60, 2, 4, 16, kv_dtype)
    exe, other = backend.compile(_attentive(), limits), backend.compile(_attentive(), limits)
    alone = [other.run(Batch.single([*prefix, *end], 0, _ints(0, 1), out_rows=range(20, 29)))[0].copy() for end in ends]
    other.close()
    exe.run(Batch.single(_draw(rng, 32), 0, _ints(0, 2)))  # page 2 is not clean
    exe.run(Batch.single(prefix, 0, _ints(3, 1)))
    exe.copy_page(1, 2)
    positions = np.broadcast_to(np.tile(np.arange(20, 29), 2), (3, 18))
    fields = (ends.reshape(-1), positions, [0, 9, 18], [20, 20], [0, 1], [[3, 1], [3, 2]], np.arange(18))
    logits, _ = exe.run(Batch(*(np.ascontiguousarray(f, np.int32) for f in fields)))
    equal(logits, np.concatenate(alone))
    exe.close()


# ------------------------------------------------------------------------------------------ sizes, numbers, shapes


def test_a_state_that_was_read_can_be_put_back(implementation: Implementation) -> None:
    program = _recurrent(*SHAPES["even"])
    exe = implementation.make().compile(program, Limits(20, 20, 3, 1))
    first, rest = range(9), range(9, 12)
    exe.run(Batch.single(first, 0, _ints(0), 0))
    delta, conv = exe.read_slot(0)
    want = exe.run(Batch.single(rest, 9, _ints(0), 0))[0].copy()
    exe.write_slot(2, delta, conv)
    np.testing.assert_array_equal(exe.run(Batch.single(rest, 9, _ints(0), 1, source=2))[0], want)
    for slot in (0, 2):
        exe.copy_slot(slot, 1)
        for got, state in zip(exe.read_slot(1), exe.read_slot(slot), strict=True):
            np.testing.assert_array_equal(got, state)
    exe.close()


@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
def test_sizes_of_a_slot_and_a_page(implementation: Implementation, kv_dtype: KvType) -> None:
    backend, limits = implementation.make(), Limits(slots=3, pages=5, page_tokens=16, kv_dtype=kv_dtype)
    exe = backend.compile(_recurrent(*SHAPES["odd"]), limits)
    assert exe.state_bytes == sum(state.nbytes for state in exe.read_slot(0)) == 4 * 2 * (3 * 20 * 20 + 65 * 3)
    exe.close()
    exe = backend.compile(_attentive(), limits)
    assert exe.page_bytes == 2 * 2 * 16 * 2 * 16 * (2 if kv_dtype == "f16" else 4)  # k and v, layers, tokens, heads, d
    exe.close()


def test_unknown_slots_and_pages_and_other_shapes_are_refused(implementation: Implementation) -> None:
    exe = implementation.make().compile(_recurrent(*SHAPES["even"]), Limits(slots=3, pages=2))
    delta, conv = exe.read_slot(0)
    for bad in (-1, 3):
        with pytest.raises(BackendError, match=f"slot {bad} is not one of the 3 slots"):
            exe.read_slot(bad)
        with pytest.raises(BackendError, match=f"slot {bad} is not one of the 3 slots"):
            exe.write_slot(bad, delta, conv)
        for pair in ((bad, 0), (0, bad)):
            with pytest.raises(BackendError, match=f"slot {bad} is not one of the 3 slots"):
                exe.copy_slot(*pair)
    for pair in ((-1, 0), (0, -1), (0, 2), (2, 0)):
        with pytest.raises(BackendError, match="is not one of the 2 pages"):
            exe.copy_page(*pair)
    with pytest.raises(BackendError, match="the delta state of a slot is"):
        exe.write_slot(0, delta[0], conv)
    with pytest.raises(BackendError, match="the conv state of a slot is"):
        exe.write_slot(0, delta, conv[..., :1])
    exe.close()


def _given(**changes: Any) -> Batch:
    """Two sequences of 1 and 2 rows in slots 0 and 1; the second one has 3 tokens and comes from slot 2."""
    fields: dict[str, Any] = {
        "tokens": [0, 1, 2],
        "positions": np.zeros((3, 3)),
        "row_offsets": [0, 1, 3],
        "starts": [0, 3],
        "slots": [0, 1],
        "pages": [[0, 1], [2, 3]],
        "out_rows": [2],
        "sources": [0, 2],
        "save_rows": [0, 2],
        "save_slots": [3, 4],
    }
    return Batch(**{k: np.asarray(v, np.int32) for k, v in fields.items()} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"save_rows": _ints(0, 3)}, "save_rows"),
        ({"save_rows": _ints(-1, 2)}, "save_rows"),
        ({"save_rows": _ints(2, 0)}, "save_rows"),
        ({"save_rows": _ints(2, 2)}, "save_rows"),
        ({"save_rows": _ints(2)}, "save_slots"),
        ({"save_slots": _ints(3)}, "save_slots"),
        ({"save_slots": _ints(3, 5)}, "each saved state"),
        ({"save_slots": _ints(-1, 4)}, "each saved state"),
        ({"save_slots": _ints(3, 3)}, "each saved state"),
        ({"save_slots": _ints(3, 1)}, "each saved state"),
        ({"save_slots": _ints(3, 2)}, "sources"),
        ({"sources": _ints(0, 0)}, "sources"),
        ({"sources": _ints(0, 5)}, "sources"),
        ({"sources": _ints(-1, 2)}, "sources"),
        ({"sources": _ints(0, 1, 2)}, "sources"),
        ({"starts": _ints(3, 3), "sources": _ints(1, 2)}, "sources"),
        ({"starts": _ints(0, 2**31 - 1)}, "lacks pages"),  # the end is no int32
        ({"tokens": np.arange(3)}, "contiguous int32"),
        ({"pages": np.zeros((2, 4), np.int32)[:, ::2]}, "contiguous int32"),
        ({"out_rows": np.zeros((1, 1), np.int32)}, "out_rows"),
    ],
)
def test_a_step_that_contradicts_itself_is_refused(
    implementation: Implementation, changes: dict[str, Array], message: str
) -> None:
    exe = implementation.make().compile(_recurrent(*SHAPES["odd"]), Limits(4, 4, 5, 4, 4))
    exe.run(_given())
    exe.run(_given(sources=_ints(1, 2)))  # no state is read by a sequence that begins
    exe.run(_given(starts=_ints(2, 3), sources=_ints(2, 2)))  # shared
    with pytest.raises(BackendError, match=message):
        exe.run(_given(**changes))
    exe.close()


def test_sources_are_the_slots_unless_given() -> None:
    batch = Batch.single([1, 2, 3], 4, _ints(0), 5, saves=[(0, 7), (2, 6)])
    assert (batch.sources.tolist(), batch.save_rows.tolist(), batch.save_slots.tolist()) == ([5], [0, 2], [7, 6])
    assert Batch.single([1], 4, _ints(0), 5, source=3).sources.tolist() == [3]
    positional = (batch.tokens, batch.positions, batch.row_offsets, batch.starts, batch.slots, batch.pages)
    plain = Batch(*positional, out_rows=batch.out_rows)
    assert plain.sources is plain.slots
    assert plain.save_rows.size == plain.save_slots.size == 0

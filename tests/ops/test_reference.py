"""The reference against plain formulas, written token by token and number by number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen35rt.backends.base import Batch, KvType, Limits
from qwen35rt.backends.reference import KERNELS, ReferenceBackend
from qwen35rt.errors import BackendError
from qwen35rt.model.program import OP_KINDS, Op, Program, StateShape

from .case import Case, Inputs, check_case, nmse, run_case
from .cases import all_cases

Array = npt.NDArray[Any]
Heads = list[list[float]]  # an input of one token: [heads][dim]
Past = dict[Any, Any]  # what one sequence keeps, by op


def _sig(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _flat(heads: Heads) -> list[float]:
    return [x for head in heads for x in head]


def _embed(op: Op, ins: list[Heads], past: Past) -> Array:
    return op.weights[0].dequantize()[past["token"]]


def _rms(x: list[float], eps: float) -> list[float]:
    root = math.sqrt(sum(v * v for v in x) / len(x) + eps)
    return [v / root for v in x]


def _rms_norm(op: Op, ins: list[Heads], past: Past) -> list[float]:
    return [v * w for head in ins[0] for v, w in zip(_rms(head, op.attrs["eps"]), op.vectors[0].tolist(), strict=True)]


def _linear(op: Op, ins: list[Heads], past: Past) -> list[float]:
    return [sum(w * v for w, v in zip(row, ins[0][0], strict=True)) for row in op.weights[0].dequantize().tolist()]


def _rope(op: Op, ins: list[Heads], past: Past) -> list[float]:
    half, sections, out = op.attrs["rot"] // 2, op.attrs["sections"], []
    for head in ins[0]:
        y = list(head)
        for j in range(half):
            axis = j % 3 if j < 3 * sections[j % 3] or j % 3 == 0 else 0
            angle = past["position"][axis] / op.attrs["theta"] ** (2 * j / op.attrs["rot"])
            turned = complex(head[j], head[j + half]) * complex(math.cos(angle), math.sin(angle))
            y[j], y[j + half] = turned.real, turned.imag
        out += y
    return out


def _kv_append(op: Op, ins: list[Heads], past: Past) -> None:
    past.setdefault("kv", []).append((ins[0], ins[1]))


def _attention(op: Op, ins: list[Heads], past: Past) -> list[float]:
    out: list[float] = []
    for h, q in enumerate(ins[0]):
        kv_head = h // (len(ins[0]) // op.attrs["kv_heads"])
        scores = [
            math.exp(sum(a * b for a, b in zip(q, k[kv_head], strict=True)) / math.sqrt(len(q))) for k, _ in past["kv"]
        ]
        total = sum(scores)
        out += [
            sum(s / total * v[kv_head][d] for s, (_, v) in zip(scores, past["kv"], strict=True)) for d in range(len(q))
        ]
    return out


def _sigmoid_mul(op: Op, ins: list[Heads], past: Past) -> list[float]:
    x, gate = _flat(ins[0]), _flat(ins[1])
    return [v * _sig(gate[0] if len(gate) == 1 else g) for v, g in zip(x, gate * (len(x) // len(gate)), strict=True)]


def _conv1d_silu(op: Op, ins: list[Heads], past: Past) -> list[float]:
    w, out = op.vectors[0].tolist(), []
    seen = past.setdefault("conv", [[0.0] * len(w)] * (len(w[0]) - 1))
    seen.append(ins[0][0])
    for c, taps in enumerate(w):
        y = sum(tap * seen[-len(taps) + i][c] for i, tap in enumerate(taps))
        out.append(y * _sig(y))
    return out


def _delta_gates(op: Op, ins: list[Heads], past: Past) -> list[float]:
    bias, a = (v.tolist() for v in op.vectors)
    g = [math.log1p(math.exp(x + d)) * n for x, d, n in zip(ins[0][0], bias, a, strict=True)]
    return g + [_sig(x) for x in ins[1][0]]


def _l2_norm(op: Op, ins: list[Heads], past: Past) -> list[float]:
    return [v / math.sqrt(sum(x * x for x in head) + 1e-6) * op.attrs["scale"] for head in ins[0] for v in head]


def _delta_net(op: Op, ins: list[Heads], past: Past) -> list[float]:
    """The state here is [d_k][d_v], transposed from the backend's."""
    q, k, v, ((*gates,),) = ins
    n, d, out = len(v), len(v[0]), []
    states = past.setdefault("delta", [[[0.0] * d for _ in range(d)] for _ in range(n)])
    for h in range(n):
        s, key, query = states[h], k[h % len(k)], q[h % len(q)]
        decay, beta = math.exp(gates[h]), gates[n + h]
        for i in range(d):
            for j in range(d):
                s[i][j] *= decay
        u = [beta * (v[h][j] - sum(s[i][j] * key[i] for i in range(d))) for j in range(d)]
        for i in range(d):
            for j in range(d):
                s[i][j] += key[i] * u[j]
        out += [sum(s[i][j] * query[i] for i in range(d)) for j in range(d)]
    return out


def _gated_rms_norm(op: Op, ins: list[Heads], past: Past) -> list[float]:
    normed = _rms_norm(op, ins[:1], past)
    return [n * z * _sig(z) for n, z in zip(normed, _flat(ins[1]), strict=True)]


def _silu_mul(op: Op, ins: list[Heads], past: Past) -> list[float]:
    return [g * _sig(g) * u for g, u in zip(_flat(ins[0]), _flat(ins[1]), strict=True)]


def _add(op: Op, ins: list[Heads], past: Past) -> list[float]:
    return [a + b for a, b in zip(ins[0][0], ins[1][0], strict=True)]


def _moe_route(op: Op, ins: list[Heads], past: Past) -> list[float]:
    """Softmax over all experts, the largest taken one by one, then divided by their sum."""
    scores, chosen = list(ins[0][0]), []
    p = [math.exp(s) for s in scores]
    for _ in range(op.attrs["used"]):
        best = scores.index(max(scores))
        chosen.append(best)
        scores[best] = -math.inf
    return [*map(float, chosen), *(p[e] / sum(p[c] for c in chosen) for e in chosen)]


def _moe_linear(op: Op, ins: list[Heads], past: Past) -> list[float]:
    used, (x,), (route,), w = op.attrs["used"], ins[0], ins[1], op.weights[0].dequantize().astype(np.float64)
    inner = w.shape[2]
    parts = [w[int(route[i])] @ (x[i * inner : (i + 1) * inner] if op.attrs["reduce"] else x) for i in range(used)]
    if op.attrs["reduce"]:
        return list(sum(route[used + i] * part for i, part in enumerate(parts)))
    return list(np.concatenate(parts))


def _gather_rows(op: Op, ins: list[Heads], past: Past) -> list[float]:
    return ins[0][0]


PLAIN: dict[str, Callable[[Op, list[Heads], Past], Any]] = {k: globals()[f"_{k}"] for k in OP_KINDS}


def _token(program: Program, past: Past) -> Array:
    """All ops for one token."""
    made: dict[int, Array] = {}
    for op in program.ops:
        ins = [
            [[float(made[v.value.id][v.offset + h * v.stride + d]) for d in range(v.dim)] for h in range(v.heads)]
            for v in op.ins
        ]
        out = PLAIN[op.kind](op, ins, past)
        if out is not None:
            made[op.outs[0].id] = np.asarray(out, np.float64)
    return made[program.logits.id]


SMALL = (
    *("embed-Q4_0-64", "embed-BF16-32", "linear-Q4_K-5x256-normal", "linear-F32-3x5-odd", "linear-MXFP4-17x96-exact"),
    *("rms_norm-7", "rms_norm-heads-0.0001", "rms_norm-heads-1", "l2_norm-heads-1", "l2_norm-heads-0.0001"),
    *("add-7", "silu_mul-64", "silu_mul-views", "sigmoid_mul-7-row-gate", "sigmoid_mul-gate-columns"),
    *("gated_rms_norm-3x24", "delta_gates-bias-10", "delta_gates-bias0", "delta_gates-bias10"),
    *("moe_route-3of12", "moe_route-3of12-ties", "moe_route-8of8-ties", "rope-2x32", "rope-2x32-3d", "rope-1x20-far"),
    *("moe_linear-Q8_0-5x32-2of5-normal", "moe_linear-F16-17x96-3of5-reduce-normal"),
    *("attention-2-1-32-sharp1", "attention-2-1-32-sharp8-mixed", "attention-6-3-48-sharp1-by1"),
    *("conv1d_silu-5k4", "conv1d_silu-37k4-mixed", "conv1d_silu-33k2-mixed", "conv1d_silu-16k5-by1"),
    *("delta_net-2-4-16-mixed-decay", "delta_net-2-4-16-keep-mixed", "delta_net-2-4-16-forget-by1"),
    *("delta_net-2-4-16-repeat-mixed", "ffn-F32"),
)
BY_ID = {case.id: case for case in all_cases()}


def test_case_ids_are_unique_and_every_op_has_a_plain_form() -> None:
    assert len(BY_ID) == len(all_cases())
    assert set(KERNELS) == set(OP_KINDS)
    kinds = {op.kind for name in SMALL for op in BY_ID[name].program().ops}
    assert kinds == set(OP_KINDS)


@pytest.mark.parametrize("name", SMALL)
def test_reference_equals_plain_formula(name: str) -> None:
    case = BY_ID[name]
    got, program = run_case(case, ReferenceBackend(np.float64)), case.program()
    first = np.cumsum((0, *case.lengths))
    positions = {int(t): b.positions[:, i] for b in case.batches() for i, t in enumerate(b.tokens)}
    for s, n in enumerate(case.lengths):
        past: Past = {}
        for t in range(n):
            past["token"] = int(first[s]) + t
            past["position"] = positions[past["token"]]
            want = _token(program, past)
            np.testing.assert_allclose(got.rows[s][t], want, rtol=1e-9, atol=1e-9 * np.abs(want).max())
        if "delta" in past:
            assert nmse(got.delta[s][0], np.array(past["delta"]).transpose(0, 2, 1)) < 1e-20
        if "conv" in past:
            kernel = case.state.conv_kernel
            assert nmse(got.conv[s][0], np.array(past["conv"][1 - kernel :]).T) < 1e-20


BOUNDED = [c for c in BY_ID.values() if not c.id.endswith("normal")]  # the reference rounds no inputs


@pytest.mark.parametrize("case", BOUNDED, ids=[c.id for c in BOUNDED])
def test_float32_reference_is_within_bounds(case: Case) -> None:
    """The bounds hold for float32 arithmetic, so they are fair to backends that work in it."""
    check_case(case, ReferenceBackend(np.float32))


def test_check_case_sees_an_error_in_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_ID["delta_net-2-4-16-keep"]
    check_case(case, ReferenceBackend())
    right = KERNELS["delta_net"]

    def wrong(*args: Any) -> Array:
        out = right(*args)
        assert out is not None
        out[0] *= 1.001  # the first row is the whole of the first sequence
        return out

    monkeypatch.setitem(KERNELS, "delta_net", wrong)
    with pytest.raises(AssertionError, match="out of sequence 0"):
        check_case(case, ReferenceBackend())


# ------------------------------------------------------------------------------------------ batches, slots, limits


def _conv_program() -> Program:
    return BY_ID["conv1d_silu-5k4"].program()


def _batch(**changes: Any) -> Batch:
    given: dict[str, Any] = {
        "tokens": [0, 1, 2],
        "positions": np.zeros((3, 3)),
        "row_offsets": [0, 1, 3],
        "starts": [0, 0],
        "slots": [0, 1],
        "pages": [[0], [1]],
        "out_rows": [2],
    }
    return Batch(**{k: np.asarray(v, np.int32) for k, v in (given | changes).items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [0, 1, 90]}, "vocabulary"),
        ({"tokens": [0, 1, -1]}, "vocabulary"),
        ({"out_rows": [3]}, "out_rows"),
        ({"out_rows": [-1]}, "out_rows"),
        ({"out_rows": [0, 0, 0, 0]}, "logits of 4 rows"),
        ({"row_offsets": [0, 3]}, "row_offsets"),
        ({"row_offsets": [0, 0, 3]}, "row_offsets"),
        ({"row_offsets": [0, 1, 2]}, "row_offsets"),
        ({"positions": np.zeros((3, 2))}, "positions"),
        ({"slots": [1, 1]}, "slot"),
        ({"slots": [0, 2]}, "slot"),
        ({"slots": [0, -1]}, "slot"),
        ({"starts": [0, -1]}, "starts before"),
        ({"starts": [0, 3]}, "pages"),
        ({"pages": [[0], [2]]}, "pages"),
        ({"pages": [[0], [-1]]}, "pages"),
    ],
)
def test_a_bad_batch_is_refused_with_its_reason(changes: dict[str, Any], message: str) -> None:
    exe = ReferenceBackend().compile(_conv_program(), Limits(rows=3, out_rows=3, slots=2, pages=2, page_tokens=4))
    exe.run(_batch())
    with pytest.raises(BackendError, match=message):
        exe.run(_batch(**changes))


def test_more_rows_than_the_limit_are_refused() -> None:
    exe = ReferenceBackend().compile(_conv_program(), Limits(rows=2, slots=2, pages=2))
    with pytest.raises(BackendError, match="limit is 2"):
        exe.run(_batch())


def test_start_zero_begins_anew_and_copy_slot_copies_the_whole_state() -> None:
    exe = ReferenceBackend().compile(_conv_program(), Limits(slots=2, pages=2))
    pages = np.array([0])
    first, _ = exe.run(Batch.single([5, 6], 0, pages, 0))
    exe.copy_slot(0, 1)
    carried = [exe.run(Batch.single([7], 2, pages, slot))[0] for slot in (0, 1)]
    np.testing.assert_array_equal(carried[0], carried[1])
    again, _ = exe.run(Batch.single([5, 6], 0, pages, 1))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(exe.read_slot(1)[1][0, :, -1], _conv_program().ops[0].weights[0].dequantize()[6])
    with pytest.raises(BackendError, match="slot 2"):
        exe.copy_slot(0, 2)


def test_report_names_device_rows_and_kept_values() -> None:
    exe = ReferenceBackend().compile(_conv_program(), Limits(slots=2, pages=2))
    logits, report = exe.run(_batch(out_rows=[2, 0]), keep=["y"])
    assert report.devices == {"cpu": 3}
    assert not report.on_gpu
    assert report.rows == 3
    np.testing.assert_array_equal(logits, report.values["y"][[2, 0]])
    with pytest.raises(BackendError, match="no value named 'nothing'"):
        exe.run(_batch(), keep=["nothing"])


def test_float16_pages_round_keys_and_values() -> None:
    i = Inputs("float16 pages", 9)
    q, k, v = (i.normal(32) for _ in range(3))
    i.b.kv_append(k.view(), v.view(), 0)
    out = i.b.attention(q.view(), 1, 0, "y")
    state = StateShape(1, 1, 32, 0, 1, 16, 1, 4)
    program = Program(tuple(i.b.ops), tuple(i.b.values), out, i.b.gather_rows(out, "w"), state, 32)
    program = Program(tuple(i.b.ops), program.values, out, program.logits, state, 32)
    batch = Batch.single(range(9), 0, np.array([0]), out_rows=range(9))
    kinds: tuple[KvType, ...] = ("f32", "f16")
    exact, half = (ReferenceBackend(np.float64).compile(program, Limits(kv_dtype=kv)).run(batch)[0] for kv in kinds)
    assert 1e-10 < nmse(half, exact) < 1e-6

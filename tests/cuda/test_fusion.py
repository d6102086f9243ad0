"""Which ops of a program share a launch, and which buffers share memory. That no bit changes is shown by the models."""

from __future__ import annotations

import numpy as np

from qwen35rt.backends.cuda.fusion import Node, fuse, quantizers, to_nodes
from qwen35rt.backends.cuda.memory import needs, share_buffers
from qwen35rt.model.program import Builder, Program, StateShape, Value
from tests.ops.tensors import random_tensor

SHAPE = StateShape(0, 1, 16, 0, 1, 16, 1, 4)


def _program(width: int = 64, again: bool = False) -> tuple[Program, dict[str, Value]]:
    """norm, gate and up, silu_mul, down, add; ``again``: the product is read by more than the add."""
    rng, b, made = np.random.default_rng(3), Builder(), {}
    made["x"] = b.embed(random_tensor(rng, "table", "F32", 8, width))
    made["h"] = b.rms_norm(made["x"], np.ones(width, np.float32), 1e-6, "h")
    made["gate"] = b.linear(made["h"], random_tensor(rng, "gate", "Q8_0", 96, width), "gate")
    made["up"] = b.linear(made["h"], random_tensor(rng, "up", "Q8_0", 96, width), "up")
    made["act"] = b.silu_mul(made["gate"], made["up"], "act")
    made["down"] = b.linear(made["act"], random_tensor(rng, "down", "Q8_0", width, 96), "down")
    made["y"] = b.add(made["x"], made["down"], "y")
    if again:
        made["y"] = b.add(made["y"], made["down"], "z")
    made["out"] = b.gather_rows(made["y"], "out")
    return Program(tuple(b.ops), tuple(b.values), made["y"], made["out"], SHAPE, 8), made


def _kinds(nodes: list[Node]) -> list[str]:
    return [node.op.kind for node in nodes]


def test_products_of_one_input_and_the_add_behind_one_share_launches() -> None:
    program, made = _program()
    nodes = fuse(program, [program.logits])
    assert _kinds(nodes) == ["embed", "rms_norm", "linear", "silu_mul", "linear", "gather_rows"]
    assert [p.out.name for p in nodes[2].parts] == ["gate", "up"]
    (part,) = nodes[4].parts
    assert (part.out, part.residual) == (made["y"], made["x"])
    assert sum(node.ops for node in nodes) == len(program.ops)


def test_norms_and_rotations_of_queries_and_keys_share_launches() -> None:
    """Of heads of one size and with equal numbers, where the second does not read the first."""
    rng, b = np.random.default_rng(4), Builder()
    x = b.embed(random_tensor(rng, "table", "F32", 8, 128))
    w = np.ones(32, np.float32)
    q = b.rms_norm(x.view(2, 32), w, 1e-6, "q")
    k = b.rms_norm(x.view(1, 32, 64), w, 1e-6, "k")
    q, k = b.rope(q.view(2, 32), 1e7, 8, (2, 1, 1), "qr"), b.rope(k.view(1, 32), 1e7, 8, (2, 1, 1), "kr")
    a = b.l2_norm(q.view(2, 32), 0.5, "a")
    c = b.l2_norm(a.view(4, 16), 1.0, "c")  # another size, and of what was just made
    d = b.rms_norm(c.view(2, 32), w, 1e-5, "d")
    e = b.rms_norm(c.view(2, 32), w, 1e-6, "e")  # another eps
    out = b.gather_rows(b.add(d, e, "y"), "out")
    program = Program(tuple(b.ops), tuple(b.values), x, out, SHAPE, 8)
    nodes = fuse(program, [out])
    paired = [(n.op.outs[0].name, n.second.outs[0].name) for n in nodes if n.second]
    assert paired == [("q", "k"), ("qr", "kr")]
    assert k in [v for n in nodes for v in n.outs]


def test_a_product_that_is_read_again_or_asked_for_stays() -> None:
    program, made = _program(again=True)
    assert _kinds(fuse(program, [program.logits])).count("add") == 2
    program, made = _program()
    assert _kinds(fuse(program, [made["down"]])).count("add") == 1


def test_values_are_quantised_where_they_are_made() -> None:
    program, made = _program()
    nodes = fuse(program, [program.logits])
    assert quantizers(nodes) == {made["h"].id: 1, made["act"].id: 3}
    nodes = to_nodes(program)
    assert quantizers(nodes) == {made["h"].id: 1, made["act"].id: 4}


def test_buffers_of_values_that_live_at_once_are_different() -> None:
    program, _ = _program(again=True)
    for nodes in (fuse(program, [program.logits]), to_nodes(program)):
        wanted = needs(nodes, [program.logits])
        chosen, sizes = share_buffers(wanted)
        assert len(sizes) < len(wanted)
        for a in wanted:
            assert sizes[chosen[a.key]][0] >= a.width
            for b in wanted:
                if a.key != b.key and chosen[a.key] == chosen[b.key]:
                    assert a.last < b.first or b.last < a.first, (a, b)

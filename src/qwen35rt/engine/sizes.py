"""How many slots and pages an executable gets. Numbers only."""

from __future__ import annotations

from ..backends.base import KvType, Limits
from ..config import ENGINE
from ..model.program import Program


def pool_limits(
    program: Program,
    n_ctx: int,
    n_batch: int,
    parallel: int,
    cache_bytes: int,
    kv_dtype: KvType = "f16",
    memory_bytes: int | None = None,
) -> Limits:
    """Limits for ``parallel`` sequences of ``n_ctx`` tokens beside a prefix cache of ``cache_bytes``.

    Slots: one for each sequence, and one for each state that the cache can hold. Pages: a whole context for each
    sequence and one more, into which a page that goes on being filled is copied, and what the cache can hold.
    ``memory_bytes``: what slots and pages may take together; where it is less than that there are fewer pages, at least
    those of one sequence: then turns wait for memory, or lose theirs to older ones for a while.
    """
    sized = Limits(page_tokens=ENGINE.page_tokens, kv_dtype=kv_dtype)
    state = program.state.state_bytes()
    page = max(1, program.state.page_bytes(sized.page_tokens, sized.value_bytes))
    whole = -(-n_ctx // sized.page_tokens) + 1
    states = min(cache_bytes // (state + page), ENGINE.max_cache_states)
    kept = min((cache_bytes - state) // page, states * whole) if states else 0
    pages = parallel * whole + kept
    if memory_bytes is not None:
        pages = min(pages, (memory_bytes - (parallel + states) * state) // page)
    rows = max(min(n_batch, n_ctx), parallel)
    return Limits(
        rows=rows,
        out_rows=max(min(rows, ENGINE.logits_rows), parallel),
        slots=parallel + states,
        pages=max(pages, whole),
        page_tokens=sized.page_tokens,
        kv_dtype=kv_dtype,
    )

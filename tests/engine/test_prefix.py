"""The prefix cache against a plain list of its entries, and its bound (B02, B04)."""

from __future__ import annotations

import random

import pytest

from qwen35rt.engine.pools import Pages, Slots
from qwen35rt.engine.prefix import Entry, PrefixCache

STATE, PAGE = 1000, 100


def make(slots: int = 8, pages: int = 64, limit: int = 1 << 30) -> tuple[PrefixCache, Pages, Slots]:
    pool, taken = Pages(pages), Slots(slots)
    return PrefixCache(pool, taken, PAGE, STATE, limit), pool, taken


def take(pages: Pages, n: int) -> list[int]:
    found = [pages.take() for _ in range(n)]
    assert None not in found
    return [p for p in found if p is not None]


def test_longest_proper_prefix_is_found() -> None:
    cache, pages, _ = make()
    ids = list(range(100))
    for n in (10, 40, 70):
        assert cache.keep(ids[:n], take(pages, 1)) is not None
    for n, best in ((9, None), (10, None), (11, 10), (40, 10), (41, 40), (71, 70), (100, 70)):
        found = cache.find(ids[:n])
        assert (found.position if found else None) == best
    other = [*ids[:50], 999, *ids[51:]]
    found = cache.find(other)
    assert found is not None
    assert found.position == 40
    assert cache.find([5, 6, 7]) is None


def test_equal_ids_are_kept_once() -> None:
    cache, pages, slots = make()
    assert cache.keep([1, 2, 3], take(pages, 1)) is not None
    assert cache.keep([1, 2, 3], take(pages, 1)) is None
    assert (cache.entries, slots.free) == (1, 7)


def test_pages_outlive_their_first_holder_and_are_freed_with_the_last_entry() -> None:
    cache, pages, slots = make(pages=3)
    mine = take(pages, 2)
    first = cache.keep(range(70), mine)
    second = cache.keep(range(100), mine)
    for page in mine:
        pages.drop(page)
    assert pages.free == 1
    assert first is not None
    assert second is not None
    cache.remove(first)
    assert pages.free == 1
    cache.remove(second)
    assert (pages.free, slots.free, cache.bytes) == (3, 8, 0)
    cache.remove(second)  # passed over


def test_bound_holds_and_pinned_entries_stay() -> None:
    cache, pages, _ = make(limit=2 * (STATE + PAGE))
    a = cache.keep([1] * 5, take(pages, 1))
    assert a is not None
    a.pins += 1
    for i in range(2, 9):
        cache.keep([i] * 5, take(pages, 1))
        assert cache.bytes <= cache.limit_bytes
    assert cache.find([1] * 6) is a
    assert cache.entries == 2


def test_what_exceeds_the_bound_alone_is_not_kept_and_evicts_nothing() -> None:
    cache, pages, _ = make(limit=STATE + 2 * PAGE)
    assert cache.keep([1, 2], take(pages, 1)) is not None
    assert cache.keep([3, 4], take(pages, 3)) is None
    assert cache.entries == 1


def test_limit_zero_keeps_and_finds_nothing() -> None:
    cache, pages, _ = make(limit=0)
    assert cache.keep([1, 2], take(pages, 1)) is None
    assert cache.find([1, 2, 3]) is None


def test_least_useful_goes_first() -> None:
    cache, pages, _ = make(slots=2)
    long, short = list(range(500)), list(range(1000, 1010))
    cache.keep(long, take(pages, 1))
    cache.keep(short, take(pages, 1))
    cache.keep([7, 7, 7], take(pages, 1))
    assert cache.find([*long, 1]) is not None
    assert cache.find([*short, 1]) is None


@pytest.mark.parametrize("seed", range(20))
def test_against_a_list(seed: int) -> None:
    rng = random.Random(seed)
    cache, pages, slots = make(slots=6, pages=40, limit=5 * STATE + 20 * PAGE)
    model: dict[Entry, tuple[int, ...]] = {}
    for _ in range(400):
        # Few letters, so that texts share prefixes, extend and equal each other.
        ids = tuple(rng.choice("ab") * rng.randint(1, 3) for _ in range(rng.randint(1, 8)))
        numbers = tuple(ord(c) for c in "".join(ids))
        action = rng.random()
        if action < 0.5:
            mine = take(pages, rng.randint(1, 2))
            before = dict(model)
            entry = cache.keep(numbers, mine)
            for page in mine:
                pages.drop(page)
            model = {e: t for e, t in before.items() if e in cache._entries}
            if entry is not None:
                assert numbers not in model.values()
                model[entry] = numbers
        elif action < 0.6 and model:
            gone = rng.choice(list(model))
            cache.remove(gone)
            del model[gone]
        else:
            found = cache.find(numbers)
            best = max((len(t) for t in model.values() if t == numbers[: len(t)] and len(t) < len(numbers)), default=0)
            assert (found.position if found else 0) == best
        for entry, text in model.items():
            assert entry.position == len(text)
        assert cache.entries == len(model)
        assert cache.bytes <= cache.limit_bytes
        assert slots.free == 6 - len(model)
        assert pages.free == 40 - len({p for e in model for p in e.pages})
    cache.clear()
    assert (pages.free, slots.free, cache.bytes) == (40, 6, 0)

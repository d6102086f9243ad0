"""Kept states of earlier prompts, found by the tokens that led to them.

A recurrent state cannot be cut back, so a prompt can only go on from a position at which a state was kept. Each entry
holds such a state in a slot of the executable, and references to the KV pages of the tokens before it. Entries lie in
a radix tree over token ids. Knows nothing of sessions and of what lies in slots and pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .pools import Pages, Slots


class Entry:
    """The state after ``position`` tokens. While ``pins`` is not 0 it stays, whatever else needs room."""

    def __init__(self, node: _Node, slot: int, pages: tuple[int, ...], used: int) -> None:
        self.slot, self.pages, self.used, self.pins = slot, pages, used, 0
        self._node = node
        self._numbers = np.array(pages, np.int32)

    @property
    def position(self) -> int:
        """Tokens that are in the state."""
        return self._node.depth

    @property
    def gain(self) -> int:
        """Tokens that would have to be computed again without this entry."""
        above = self._node.parent
        while above is not None and above.entry is None:
            above = above.parent
        return self._node.depth - (above.depth if above is not None else 0)


class _Node:
    """``edge``: the ids between the parent's tokens and this node's."""

    def __init__(self, edge: tuple[int, ...], parent: _Node | None) -> None:
        self.edge, self.parent = edge, parent
        self.children: dict[int, _Node] = {}
        self.entry: Entry | None = None
        self.depth: int = len(edge) + (parent.depth if parent is not None else 0)


class PrefixCache:
    """Entries whose states and distinct pages never take more than ``limit_bytes``; 0 turns it off.

    Least useful first out: the tokens that an entry saves, per byte that it alone holds, divided by its age: lookups
    and new entries since it was made or last of use. So where there is little room the latest states of a conversation
    outlive those between.
    """

    def __init__(self, pages: Pages, slots: Slots, page_bytes: int, state_bytes: int, limit_bytes: int) -> None:
        self._pages, self._slots = pages, slots
        self._page_bytes, self._state_bytes = page_bytes, state_bytes
        self.limit_bytes = limit_bytes
        self.evictions = 0
        self._root = _Node((), None)
        self._entries: dict[Entry, None] = {}
        self._holders = np.zeros(pages.count, np.int32)  # entries that refer to a page
        self._distinct = 0  # pages that any entry refers to
        self._tick = 0

    @property
    def entries(self) -> int:
        """States that are kept."""
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """What the entries take: their states, and each page once."""
        return len(self._entries) * self._state_bytes + self._distinct * self._page_bytes

    def find(self, ids: Sequence[int]) -> Entry | None:
        """The entry of the longest proper prefix of ``ids``; it counts as used."""
        self._tick += 1
        ids = tuple(ids)
        node, best = self._root, None
        while True:
            if node.entry is not None and node.depth < len(ids):
                best = node.entry
            below = node.children.get(ids[node.depth]) if node.depth < len(ids) else None
            if below is None or ids[node.depth : below.depth] != below.edge:
                break
            node = below
        if best is not None:
            best.used = self._tick
        return best

    def keep(self, ids: Sequence[int], pages: Sequence[int], slot: int | None = None) -> Entry | None:
        """Make an entry for the state after ``ids``, whose tokens lie in ``pages``.

        ``slot``: a taken one that holds the state and belongs to the entry from now on; None: a free one is taken,
        which the caller fills. -> None if there is such an entry already, if it would exceed the bound by itself, or
        if there is no room that could be made.
        """
        ids = tuple(ids)
        if not ids or self._state_bytes + len(pages) * self._page_bytes > self.limit_bytes:
            return None
        self._tick += 1
        present = self._exact(ids)
        if present is not None:
            present.used = self._tick
            return None
        while (slot is None and not self._slots.free) or self._bytes_with(pages) > self.limit_bytes:
            if not self.evict():
                return None
        slot = self._slots.take() if slot is None else slot
        assert slot is not None
        node = self._reach(ids)
        node.entry = entry = Entry(node, slot, tuple(pages), self._tick)
        self._entries[entry] = None
        for page in entry.pages:
            self._pages.share(page)
        self._distinct += int(np.count_nonzero(self._holders[entry._numbers] == 0))
        self._holders[entry._numbers] += 1
        return entry

    def evict(self) -> bool:
        """Drop the least useful entry; False if there is none that may go."""
        candidates = [e for e in self._entries if not e.pins]
        if not candidates:
            return False
        self.remove(min(candidates, key=self._use))
        self.evictions += 1
        return True

    def remove(self, entry: Entry) -> None:
        """Drop an entry; one that is gone already is passed over."""
        if entry not in self._entries:
            return
        del self._entries[entry]
        self._slots.give(entry.slot)
        for page in entry.pages:
            self._pages.drop(page)
        self._holders[entry._numbers] -= 1
        self._distinct -= int(np.count_nonzero(self._holders[entry._numbers] == 0))
        node = entry._node
        node.entry = None
        self._tidy(node)

    def clear(self) -> None:
        """Drop every entry."""
        for entry in list(self._entries):
            self.remove(entry)

    def _use(self, entry: Entry) -> float:
        own = int(np.count_nonzero(self._holders[entry._numbers] == 1))
        age = 1 + self._tick - entry.used
        return entry.gain / (age * (self._state_bytes + own * self._page_bytes))

    def _bytes_with(self, pages: Sequence[int]) -> int:
        new = int(np.count_nonzero(self._holders[np.array(pages, np.int32)] == 0))
        return self.bytes + self._state_bytes + new * self._page_bytes

    def _exact(self, ids: tuple[int, ...]) -> Entry | None:
        node = self._root
        while node.depth < len(ids):
            below = node.children.get(ids[node.depth])
            if below is None or ids[node.depth : below.depth] != below.edge:
                return None
            node = below
        return node.entry

    def _reach(self, ids: tuple[int, ...]) -> _Node:
        """The node of ``ids``, made where it is missing."""
        node = self._root
        while node.depth < len(ids):
            below = node.children.get(ids[node.depth])
            if below is None:
                below = _Node(ids[node.depth :], node)
                node.children[below.edge[0]] = below
            else:
                edge, rest = below.edge, ids[node.depth :]
                same = next((i for i, (a, b) in enumerate(zip(edge, rest, strict=False)) if a != b), None)
                same = min(len(edge), len(rest)) if same is None else same
                if same < len(edge):
                    below = self._split(below, same)
            node = below
        return node

    def _split(self, node: _Node, at: int) -> _Node:
        """Put a node into the edge of ``node`` behind ``at`` ids; -> that node."""
        assert node.parent is not None
        upper = _Node(node.edge[:at], node.parent)
        node.parent.children[upper.edge[0]] = upper
        node.edge, node.parent = node.edge[at:], upper
        upper.children[node.edge[0]] = node
        return upper

    def _tidy(self, node: _Node) -> None:
        """Take nodes without an entry out of the tree, as far as they branch nothing."""
        while node.parent is not None and node.entry is None and len(node.children) < 2:
            parent = node.parent
            if node.children:
                (child,) = node.children.values()
                child.edge, child.parent = node.edge + child.edge, parent
                parent.children[child.edge[0]] = child
                return
            del parent.children[node.edge[0]]
            node = parent

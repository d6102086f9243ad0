"""Which KV pages and state slots are taken. Numbers only: the memory behind them belongs to the executable."""

from __future__ import annotations


class Slots:
    """Numbers from 0 to ``count`` - 1, each free or taken."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._taken = [False] * count

    @property
    def free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    def take(self) -> int | None:
        """A free slot, or None."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._taken[slot] = True
        return slot

    def give(self, slot: int) -> None:
        """Give a slot back; giving a free one back is an error of the caller."""
        if not self._taken[slot]:
            raise ValueError(f"slot {slot} is free already")
        self._taken[slot] = False
        self._free.append(slot)


class Pages:
    """Page numbers that several holders may share; a page is free again when the last one drops it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        """Pages that can be taken."""
        return len(self._free)

    def take(self) -> int | None:
        """A free page for one holder, or None."""
        if not self._free:
            return None
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that is taken."""
        if not self._holders[page]:
            raise ValueError(f"page {page} is free")
        self._holders[page] += 1

    def drop(self, page: int) -> None:
        """One holder less."""
        if not self._holders[page]:
            raise ValueError(f"page {page} is free already")
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)

"""Begins the checks of instruction levels early in a long session; see test_levels.py."""

from __future__ import annotations

import pytest

from qwen35rt.cpu_count import usable_cpus

from .test_levels import CHECKS, Begun, lacks

MANY = 1_000  # tests of a session that take long enough
BEGUN = pytest.StashKey[Begun]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin those that were chosen, where other tests come before them and there is a core for each."""
    names = {item.name for item in session.items}
    chosen = [check for check in CHECKS if f"test_level[{check}]" in names and lacks(check) is None]
    if len(session.items) >= MANY and usable_cpus().affinity > 1 and not session.config.option.collectonly:
        session.stash[BEGUN] = Begun(chosen)


@pytest.fixture(scope="session")
def begun(request: pytest.FixtureRequest) -> Begun:
    """Checks of levels, begun or not."""
    stash = request.session.stash
    if BEGUN not in stash:
        stash[BEGUN] = Begun(())
    return stash[BEGUN]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End them, asked for or not."""
    if begun := session.stash.get(BEGUN, None):
        begun.close()

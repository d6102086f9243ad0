"""How many threads this process may really use. Reads /proc and /sys below a root that tests replace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .config import environment
from .errors import ConfigError


@dataclass(frozen=True)
class CpuCount:
    """The limits found, each in whole CPUs; None where there is none or it could not be read."""

    affinity: int
    quota: int | None  # CPU time of the cgroup and of all above it, rounded down, at least 1
    physical: int | None  # cores of the machine, hardware threads of one core counted once

    @property
    def threads(self) -> int:
        """The smallest of the limits."""
        return min(n for n in (self.affinity, self.quota, self.physical) if n is not None)

    @property
    def reason(self) -> str:
        """Which limit decides, for people."""
        if self.threads == self.quota:
            return "CPU quota of the cgroup"
        return "physical cores" if self.threads == self.physical else "CPU affinity"


def own_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def usable_cpus(root: Path = Path("/"), affinity: int | None = None) -> CpuCount:
    """Read the limits of this process from ``root``/proc and ``root``/sys; ``affinity`` replaces the kernel's."""
    if affinity is None:
        affinity = own_cpus()
    quotas = [quota // period for quota, period in _quotas(root)]
    return CpuCount(affinity, max(1, min(quotas)) if quotas else None, _physical_cores(root))


def usable_threads(asked: int | str | None = None, root: Path = Path("/")) -> int:
    """Threads to use: the caller's number, else QWEN35RT_THREADS, else what the machine allows.

    Raises ConfigError for anything but a whole number from 1 to 1024.
    """
    name = "threads"
    if asked is None:
        asked, name = environment().threads, "QWEN35RT_THREADS"
    if asked is None:
        return usable_cpus(root).threads
    try:
        count = int(asked)
    except ValueError:
        count = 0
    if isinstance(asked, bool) or not 1 <= count <= 1024:
        raise ConfigError(f"{name} is {asked!r}; a whole number from 1 to 1024 is needed")
    return count


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _quotas(root: Path) -> Iterator[tuple[int, int]]:
    """(quota, period) in microseconds of the process's group and of every group above it, v1 and v2."""
    groups = _groups(root)
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        # "36 35 0:30 /its/root /mount/point options - cgroup2 source super,options"
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or not kind or kind[0] not in ("cgroup", "cgroup2"):
            continue
        v2 = kind[0] == "cgroup2"
        if not v2 and "cpu" not in kind[-1].split(","):
            continue
        top = root / fields[4].lstrip("/")
        for folder in _upwards(top, fields[3], groups.get("" if v2 else "cpu", "/")):
            pair = _quota_v2(folder) if v2 else _quota_v1(folder)
            if pair is not None:
                yield pair


def _groups(root: Path) -> dict[str, str]:
    """Controller -> path of the process's group; '' is the unified hierarchy."""
    groups = {}
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            groups.update(dict.fromkeys(parts[1].split(","), parts[2]))
    return groups


def _upwards(top: Path, mount_root: str, group: str) -> Iterator[Path]:
    """The folder of the group and those above it, up to the mount point.

    A container often sees its own group as the mount's root while the group's path is the host's: then the mount point
    itself is the group.
    """
    path = PurePosixPath(group)
    if ".." not in path.parts and path.is_relative_to(mount_root):
        folder = top / path.relative_to(mount_root)
        while folder != top:
            yield folder
            folder = folder.parent
    yield top


def _quota_v2(folder: Path) -> tuple[int, int] | None:
    fields = (_read(folder / "cpu.max") or "").split()
    return _pair(fields[0], fields[1] if len(fields) > 1 else "100000") if fields else None


def _quota_v1(folder: Path) -> tuple[int, int] | None:
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    return _pair(quota, period) if quota and period else None


def _pair(quota: str, period: str) -> tuple[int, int] | None:
    """None for 'max', -1 and anything that is no quota."""
    if not (quota.isdecimal() and period.isdecimal()) or int(quota) == 0 or int(period) == 0:
        return None
    return int(quota), int(period)


def _physical_cores(root: Path) -> int | None:
    cores = set()
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*"):
        package = _read(folder / "topology/physical_package_id")
        core = _read(folder / "topology/core_id")
        if core is not None:
            # Some virtual machines number the cores of each die from 0 again.
            cores.add((package, _read(folder / "topology/die_id"), _read(folder / "topology/cluster_id"), core))
    return len(cores) or None

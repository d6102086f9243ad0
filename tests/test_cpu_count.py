"""B87: the thread count obeys affinity, cgroup quotas of both versions, and physical cores; a setting wins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qwen35rt.cpu_count import CpuCount, usable_cpus, usable_threads
from qwen35rt.errors import ConfigError


def machine(root: Path, cores: int = 16, threads_per_core: int = 1) -> Path:
    for cpu in range(cores * threads_per_core):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "core_id").write_text(f"{cpu % cores}\n")
        (folder / "physical_package_id").write_text("0\n")
    (root / "proc/self").mkdir(parents=True)
    return root


def v2(root: Path, limits: dict[str, str], group: str) -> Path:
    (root / "proc/self/cgroup").write_text(f"0::{group}\n")
    (root / "proc/self/mountinfo").write_text(
        "24 1 0:22 / /proc rw - proc proc rw\n30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
    )
    for path, text in limits.items():
        folder = root / "sys/fs/cgroup" / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(text + "\n")
    return root


def v1(root: Path, quota: str, mount_root: str = "/", group: str = "/docker/x") -> Path:
    (root / "proc/self/cgroup").write_text(f"5:memory:/other\n4:cpu,cpuacct:{group}\n1:name=systemd:{group}\n")
    (root / "proc/self/mountinfo").write_text(
        f"31 24 0:27 {mount_root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    )
    folder = root / "sys/fs/cgroup/cpu,cpuacct"
    if mount_root == "/":
        folder = folder / group.lstrip("/")
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text(quota + "\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    return root


@pytest.mark.parametrize(
    ("text", "threads"),
    [("200000 100000", 2), ("765000 100000", 7), ("50000 100000", 1), ("max 100000", 16), ("max", 16), ("300000", 3)],
)
def test_b87_quota_v2_rounds_down_and_is_at_least_1(tmp_path: Path, text: str, threads: int) -> None:
    root = v2(machine(tmp_path), {"/a": text}, "/a")
    assert usable_cpus(root, affinity=64).threads == threads


def test_b87_smallest_of_nested_limits(tmp_path: Path) -> None:
    root = v2(machine(tmp_path), {"/": "max", "/a": "400000 100000", "/a/b": "900000 100000"}, "/a/b")
    assert usable_cpus(root, affinity=64) == CpuCount(affinity=64, quota=4, physical=16)


def test_b87_group_seen_from_inside_a_container(tmp_path: Path) -> None:
    root = v2(machine(tmp_path), {"/": "150000 100000"}, "/../../outside")
    assert usable_cpus(root, affinity=64).quota == 1


@pytest.mark.parametrize(("quota", "expected"), [("-1", None), ("250000", 2), ("10000", 1)])
@pytest.mark.parametrize("mount_root", ["/", "/docker/x"])
def test_b87_quota_v1(tmp_path: Path, quota: str, expected: int | None, mount_root: str) -> None:
    assert usable_cpus(v1(machine(tmp_path), quota, mount_root), affinity=64).quota == expected


def test_b87_affinity_and_physical_cores(tmp_path: Path) -> None:
    root = machine(tmp_path, cores=8, threads_per_core=2)
    assert usable_cpus(root, affinity=3).threads == 3
    assert usable_cpus(root, affinity=3).reason == "CPU affinity"
    assert usable_cpus(root, affinity=16).threads == 8
    assert usable_cpus(root, affinity=16).reason == "physical cores"


def test_b87_nothing_readable(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path, affinity=5) == CpuCount(5, None, None)


def test_b87_a_setting_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = v2(machine(tmp_path), {"/a": "200000 100000"}, "/a")
    monkeypatch.delenv("QWEN35RT_THREADS", raising=False)
    assert usable_threads(None, root) <= 2
    monkeypatch.setenv("QWEN35RT_THREADS", "5")
    assert usable_threads(None, root) == 5
    assert usable_threads(7, root) == 7


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", "2000"])
def test_b87_setting_that_makes_no_sense(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN35RT_THREADS", value)
    with pytest.raises(ConfigError, match="QWEN35RT_THREADS"):
        usable_threads()
    with pytest.raises(ConfigError, match="threads"):
        usable_threads(value)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_b87_affinity_of_the_process() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {0}); from qwen35rt.cpu_count import usable_cpus as u; print(u().threads)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout == "1\n"

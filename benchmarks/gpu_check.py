"""Checks a GPU in under six minutes and measures it: ``python benchmarks/gpu_check.py``, or gpu_check.sh, which finds a
Python with CuPy. ``--dry-run`` does the same in emulation on tiny files.

Each phase is a process with a time limit (gpu_phases.py): its share of what is left, so that all of them together end
in time even where each is stopped, and what one does not need goes to those behind it. What it finds is printed and
appended to a CSV file at once, so that it stays when a phase fails, hangs or is killed. Files of the real shapes are
made meanwhile from a seed. A table comes last, also when this program is told to end. Needs no network.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import IO, Any

HERE = Path(__file__).resolve().parent
COLUMNS = (
    "time",
    "machine",
    "commit",
    "phase",
    "test",
    "value",
    "unit",
    "of_peak",
    "of_nominal",
    "goal",
    "status",
    "detail",
)
SIZES = ("0.8b", "4b", "9b")
GB_OF_SIZE = {"0.8b": 1, "2b": 2, "4b": 3, "9b": 6, "moe4": 2, "dry": 0}  # room for a file

# (size, test) -> (what is compared, the goal, True: at least, False: at most), stated for one H200 and Q4_K_M.
GOALS: dict[tuple[str, str], tuple[str, float, bool]] = {
    ("0.8b", "decode, 1 sequence"): ("value", 1200, True),
    ("4b", "decode, 1 sequence"): ("value", 1100, True),
    ("9b", "decode, 1 sequence"): ("of_peak", 0.7, True),
    ("4b", "decode, 32 sequences"): ("of_one", 10, True),
    ("9b", "decode, 32 sequences"): ("of_one", 10, True),
    ("0.8b", "decode, 32 sequences"): ("of_one", 10, True),
    ("4b", "prefill of 4096, steps of 512"): ("value", 25_000, True),
    ("4b", "first token of 2000"): ("value", 100, False),
}


SECONDS = 345  # for all together: the rest of six minutes is for the shell and the table
END_SECONDS = 3.0  # kept for ending a phase that is stopped
LEAST_SECONDS = 5.0  # with less a phase is left out


@dataclass(frozen=True)
class Plan:
    """A phase: its name in tables, that in gpu_phases.py, the size of its file, its share of the time: seconds, where
    there are SECONDS and three files."""

    name: str
    go: str
    size: str = ""
    share: float = 40


def plans(sizes: list[str], dry: bool) -> list[Plan]:
    """What is done, in order; what tells most comes first."""
    checks = [Plan("device", "device", "", 50), Plan("ops", "ops", "", 45), Plan("oracle", "oracle", "", 35)]
    checks += [Plan("checks", "checks", "dry" if dry else "", 30), Plan("peaks", "peaks", "", 20)]
    speeds = [Plan(size, "speed", size, 45) for size in sizes]
    return [*checks, *speeds, Plan("tests", "tests", "", 30)]


def limit_of(todo: list[Plan], left: float) -> float:
    """Seconds that the first of ``todo`` may take of the seconds that are left."""
    return (left - END_SECONDS * len(todo)) * todo[0].share / sum(plan.share for plan in todo)


class Results:
    """Rows in a CSV file, on the screen, and in the table at the end."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not path.exists()
        self.file = path.open("a", newline="", encoding="utf-8")
        self.writer = csv.DictWriter(self.file, COLUMNS, lineterminator="\n")
        if fresh:
            self.writer.writeheader()
        self.rows: list[dict[str, Any]] = []
        self.peaks: dict[str, float] = {}
        self.machine, self.commit = "", commit()

    def add(self, phase: str, test: str, value: float | str = "", unit: str = "", **more: Any) -> None:
        """One result of a phase. ``share`` is divided by the peak named ``share_of``, measured and nominal."""
        if test == "device":
            self.machine = str(value)
        if "key" in more:
            self.peaks[more["key"]] = float(value)
        row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
        row |= {"phase": phase, "test": test, "value": value, "unit": unit, "detail": more.get("detail", "")}
        for column, prefix in (("of_peak", ""), ("of_nominal", "nominal_")):
            peak = self.peaks.get(prefix + more["share_of"]) if "share_of" in more else None
            if peak:
                row[column] = more["share"] / peak
        row["status"] = "cut" if more.get("cut") else "ok" if more.get("ok", True) else "failed"
        self._judge(phase, row)
        self.rows.append(row)
        now = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "machine": self.machine, "commit": self.commit}
        self.writer.writerow({**row, **now})
        self.file.flush()
        print("  ".join(text for text in cells(row) if text), flush=True)

    def _judge(self, phase: str, row: dict[str, Any]) -> None:
        """Compare with a goal; a goal that is missed is no failure."""
        what, goal, least = GOALS.get((phase, row["test"]), ("", 0.0, True))
        if what == "of_one":
            one = [r["value"] for r in self.rows if (r["phase"], r["test"]) == (phase, "decode, 1 sequence")]
            if one:
                row["detail"] = f"{row['value'] / one[0]:.1f} times one; {row['detail']}"
            got = row["value"] / one[0] if one else None
        else:
            got = row[what] if what else None
        if isinstance(got, float):
            row["goal"] = f"{'>=' if least else '<='} {goal:g}{' x one' if what == 'of_one' else ''}"
            if what == "of_peak":
                row["goal"] += " of the peak"
            if (got < goal) if least else (got > goal):
                row["status"] = "missed"

    def close(self) -> str:
        """The table."""
        self.file.close()
        lines = [["phase", "test", "value", "of peak", "of nominal", "goal", "status", "detail"], ["-"] * 8]
        lines += [cells(row) for row in self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    @property
    def failed(self) -> list[str]:
        """Tests that failed, or found no time."""
        return [f"{r['phase']}: {r['test']}" for r in self.rows if r["status"] not in ("ok", "missed")]


def cells(row: dict[str, Any]) -> list[str]:
    """A row for people."""
    value = f"{row['value']:.4g}" if isinstance(row["value"], float) and row["value"] < 1e4 else row["value"]
    value = f"{value:,.0f}" if isinstance(value, float) else str(value)
    shares = [f"{row[c]:.1%}" if row[c] != "" else "" for c in ("of_peak", "of_nominal")]
    return [
        row["phase"],
        row["test"],
        f"{value} {row['unit']}".strip(),
        *shares,
        row["goal"],
        row["status"],
        row["detail"],
    ]


def commit() -> str:
    """The commit of this checkout."""
    try:
        git = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@dataclass
class Files:
    """Files of benchmarks, made by processes beside the checks."""

    folder: Path
    sizes: list[str]
    kind: str
    log: Any
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        """Begin with all of them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for size in self.sizes:
            command = [sys.executable, str(HERE / "make_files.py"), str(self.folder), "--plain-vocab"]
            command += ["--size", size, "--type", self.kind]
            self.running[size] = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def path(self, size: str, seconds: float) -> Path:
        """A file, when it is there. Raises RuntimeError, TimeoutError."""
        try:
            if self.running[size].wait(max(seconds, 0.1)):
                raise RuntimeError(f"the file of {size} could not be made; see the log")
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the file of {size} was not ready") from None
        return self.folder / f"{size}-{self.kind}.gguf"

    def stop(self) -> None:
        """End what still runs."""
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def run_phase(plan: Plan, options: dict[str, Any], seconds: float, results: Results, log: Any) -> None:
    """Run a phase and keep what it finds, until it ends or its time is up. It is told to end a little before."""
    told = json.dumps({**options, "seconds": seconds - END_SECONDS})
    command = [sys.executable, str(HERE / "gpu_phases.py"), plan.go, told]
    began = time.monotonic()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    queue: Queue[str | None] = Queue()
    errors: list[str] = []

    def read_results(pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                if line.startswith("{"):
                    queue.put(line)
                else:
                    log.write(line)
        queue.put(None)

    def read_errors(pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                log.write(line)
                errors.append(line.strip())

    readers = [
        threading.Thread(target=read, args=(pipe,), daemon=True)
        for read, pipe in ((read_results, process.stdout), (read_errors, process.stderr))
    ]
    for reader in readers:
        reader.start()
    late = False
    try:
        for line in lines_until(queue, began + seconds):
            try:
                found = json.loads(line)
                results.add(plan.name, found.pop("test"), found.pop("value"), found.pop("unit", ""), **found)
            except (ValueError, LookupError, TypeError):  # half of a line: the process died meanwhile
                log.write(line)
        process.wait(max(began + seconds - time.monotonic(), 0.1))
    except (Empty, subprocess.TimeoutExpired):
        late = True
    finally:
        _end(process, readers)
    taken = time.monotonic() - began
    if late:
        results.add(plan.name, "phase", f"stopped after {taken:.0f}", "s", cut=True, detail="its time was up")
    elif process.returncode:
        detail = next((text for text in reversed(errors) if text), "no error was written")
        results.add(plan.name, "phase", f"ended by {process.returncode}", ok=False, detail=detail[:400])
    else:
        results.add(plan.name, "phase", taken, "s", detail=f"of {seconds:.0f} s")


def _end(process: subprocess.Popen[str], readers: list[threading.Thread]) -> None:
    """Kill a phase that still runs, with what it started: one that waits for a device takes no other signal, and may
    take none at all, which nobody waits for."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS / 2)
    for reader in readers:
        reader.join(END_SECONDS / 6)


def lines_until(queue: Queue[str | None], end: float) -> Iterator[str]:
    """What comes through a queue, until None. Raises Empty when it is time."""
    while (line := queue.get(timeout=max(end - time.monotonic(), 0))) is not None:
        yield line


def room_for_files(sizes: list[str]) -> Path:
    """A new folder: in memory if there is room, else on the disk."""
    needed = sum(GB_OF_SIZE[size] for size in sizes)
    shm = Path("/dev/shm")
    in_memory = needed and shm.is_dir() and shutil.disk_usage(shm).free > 2e9 * needed
    return Path(tempfile.mkdtemp(prefix="qwen35rt-gpu-check-", dir=shm if in_memory else None))


def main() -> int:
    """Run all phases; -> 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="in emulation, on a tiny file; needs g++")
    parser.add_argument("--out", type=Path, help="folder of the results (default: $OUT, else benchmarks/results/gpu)")
    parser.add_argument("--size", action="append", choices=GB_OF_SIZE, help="default: 0.8b, 4b and 9b")
    parser.add_argument("--type", default="Q4_K_M", help="of the files, as in make_files.py")
    parser.add_argument("--only", action="append", metavar="PHASE", help="this phase alone; can be repeated")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all together")
    parser.add_argument("--files", type=Path, metavar="FOLDER", help="keep files here, and use those that are here")
    parser.add_argument("--emulation", type=Path, metavar="FOLDER", help="of compiled kernels, for --dry-run")
    args = parser.parse_args()
    began = time.monotonic()
    sizes = args.size or (["dry"] if args.dry_run else list(SIZES))
    todo = [p for p in plans(sizes, args.dry_run) if not args.only or p.name in args.only]
    sizes = [size for size in sizes if any(p.size == size for p in todo)]
    out = args.out or Path(os.environ.get("OUT") or HERE / "results" / "gpu")
    results = Results(out / "gpu_check.csv")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of "finally"
    with tempfile.TemporaryDirectory(prefix="qwen35rt-emulation-") as own, (out / "gpu_check.log").open("w") as log:
        folder = args.files or room_for_files(sizes)
        files = Files(folder, sizes, args.type, log)
        emulate = str(args.emulation or own) if args.dry_run else ""
        try:
            files.start()
            for number, plan in enumerate(todo):
                left = began + args.seconds - time.monotonic()
                # Emulation says nothing of time.
                end = time.monotonic() + (left if args.dry_run else limit_of(todo[number:], left))
                try:
                    path = str(files.path(plan.size, end - time.monotonic() - LEAST_SECONDS)) if plan.size else None
                except (RuntimeError, TimeoutError) as e:
                    cut = isinstance(e, TimeoutError)
                    results.add(plan.name, "phase", "left out", ok=False, cut=cut, detail=str(e))
                    continue
                if end - time.monotonic() < LEAST_SECONDS:
                    results.add(plan.name, "phase", "left out", cut=True, detail="no time was left")
                    continue
                run_phase(plan, {"path": path, "emulate": emulate}, end - time.monotonic(), results, log)
        finally:
            files.stop()
            if not args.files:
                shutil.rmtree(folder, ignore_errors=True)
            table = results.close()
            failed = results.failed
            summary = f"failed: {'; '.join(failed)}" if failed else "nothing failed"
            text = f"{table}\n\n{results.machine}, {time.monotonic() - began:.0f} s, {summary}\n"
            (out / "gpu_check.md").write_text(text)
            print("\n" + text, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

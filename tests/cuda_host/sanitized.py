"""Runs named op cases, and copies, on kernels built with sanitizers: ``python -m tests.cuda_host.sanitized FOLDER
CASE...``, with libasan loaded before Python; FOLDER is that of libraries. A fault ends the process. ``--large`` before
the cases: products in tiles of 128; ``--top``: the largest logits too.

Prints the names of the kernels that ran.
"""

from __future__ import annotations

import sys
from pathlib import Path

from qwen35rt.backends.cuda import ops
from qwen35rt.backends.cuda.backend import CudaBackend
from tests.ops.case import check_outcome, run_case
from tests.ops.cases import all_cases

from . import host
from .copies import copy_and_check
from .host import SANITIZE, HostLauncher
from .tops import find_and_check


def main(folder: str, *names: str) -> int:
    """Run the cases."""
    host.folder = lambda: Path(folder)  # type: ignore[assignment]
    flags = {name for name in names if name.startswith("--")}
    names = tuple(name for name in names if name not in flags)
    if "--large" in flags:
        vars(ops)["LARGE_FROM"] = 1
    checks = (copy_and_check, find_and_check) if "--top" in flags else (copy_and_check,)
    cases = [case for case in all_cases() if case.id in names]
    plain = HostLauncher()
    for check in checks:
        check(plain)
    for case in cases:  # shows which kernels are needed, so that all are compiled at once
        run_case(case, CudaBackend(plain))
    host.prepare(plain.modules, SANITIZE)
    launcher = HostLauncher(flags=SANITIZE)
    for check in checks:
        check(launcher)
    for case in cases:
        check_outcome(case, run_case(case, CudaBackend(launcher)))
    print(f"{len(cases)} cases: {' '.join(sorted(launcher.names))}")
    return 0 if len(cases) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

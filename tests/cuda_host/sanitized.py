"""Runs named op cases on kernels built with sanitizers: ``python -m tests.cuda_host.sanitized FOLDER CASE...``, with
libasan loaded before Python; FOLDER is that of libraries. A fault ends the process."""

from __future__ import annotations

import sys
from pathlib import Path

from qwen35rt.backends.cuda.backend import CudaBackend
from tests.ops.case import check_outcome, run_case
from tests.ops.cases import all_cases

from . import host
from .host import SANITIZE, HostLauncher


def main(folder: str, *names: str) -> int:
    """Run the cases."""
    host.folder = lambda: Path(folder)  # type: ignore[assignment]
    cases = [case for case in all_cases() if case.id in names]
    plain = HostLauncher()
    for case in cases:  # shows which kernels are needed, so that all are compiled at once
        run_case(case, CudaBackend(plain))
    host.prepare(plain.modules, SANITIZE)
    for case in cases:
        check_outcome(case, run_case(case, CudaBackend(HostLauncher(flags=SANITIZE))))
    print(f"{len(cases)} cases")
    return 0 if len(cases) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

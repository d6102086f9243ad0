"""Writes rows as a Markdown table, CSV, JSON or JSON lines, each as soon as it is known."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from typing import Any, TextIO

_LISTS = ("samples_ns", "samples_ts")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _size(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.2f} MiB"


def _params(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "model": row["model_type"],
        "size": _size(row["model_size"]),
        "params": _params(row["model_n_params"]),
        "backend": row["backend"],
        "isa": row["isa"] or "-",
        "threads": str(row["n_threads"]),
        "test": row["test"],
        "t/s": f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
        "bandwidth": _share(row["bandwidth_share"]),
        "int8 peak": _share(row["int8_share"]),
        "on_gpu": str(row["on_gpu"]).lower(),
    }


_WIDTHS = {"model": 28, "size": 11, "params": 10, "test": 16, "t/s": 20}


class Table:
    """Rows of one form on one stream."""

    def __init__(self, form: str, out: TextIO) -> None:
        self.form, self.out = form, out
        self.rows = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Write one row."""
        first = self.rows == 0
        self.rows += 1
        if self.form == "md":
            cells = _cells(row)
            widths = {name: max(_WIDTHS.get(name, 0), len(name)) for name in cells}
            if first:
                self._line("| " + " | ".join(f"{n:<{w}}" for n, w in widths.items()) + " |")
                rules = ("-" * (w + 1) + (":" if n in ("threads", "t/s") else "-") for n, w in widths.items())
                self._line("|" + "|".join(rules) + "|")
            self._line("| " + " | ".join(f"{cells[n]:<{w}}" for n, w in widths.items()) + " |")
        elif self.form == "csv":
            flat = {k: v for k, v in row.items() if k not in _LISTS}
            writer = csv.DictWriter(self.out, list(flat), quoting=csv.QUOTE_ALL, lineterminator="\n")
            if first:
                writer.writeheader()
            writer.writerow(flat)
        elif self.form == "jsonl":
            self._line(json.dumps(row))
        else:
            self._line(("[\n" if first else ",\n") + json.dumps(row, indent=2), end="")
        self.out.flush()

    def close(self) -> None:
        """Write what ends the table."""
        if self.form == "json":
            self._line("\n]" if self.rows else "[]")

    def _line(self, text: str, end: str = "\n") -> None:
        self.out.write(text + end)

"""Measures how far this project's predictions are from exact arithmetic, beside llama.cpp's on the same files.

    python benchmarks/drift.py --type Q8_0 --type Q4_K_M         the embedded model, quantised
    python benchmarks/drift.py -b float32.gguf --type Q4_K_M     another one
    python benchmarks/drift.py -m a.gguf                         a file as it is
    python benchmarks/drift.py --oracle FOLDER                   files whose logits by llama.cpp and by HF are kept

Exact is the NumPy backend: float32 activations and pages. Rows go to benchmarks/results/MACHINE-drift.csv.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from compare import commit, machine, own_isa
from peer_logits import peer_logits
from runtimes import NAMES, peer_version

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q4_0", "Q2_K")
COLUMNS = (
    *("time", "machine", "isa", "commit", "peer", "file", "reference", "pages", "positions"),
    *("kld", "peer_kld", "less", "less_low", "less_high", "same_top", "peer_same_top"),
)
FILE, BASE = "same file", "float32"  # what both runtimes are compared with
RUN, DRAWS, SHARE, SEED = 16, 4_000, 0.95, 1  # neighbouring positions that are drawn together; draws; the interval

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Closeness:
    """Predictions Q against P at n positions: KL(P || Q) in nats and whether the most likely token is the same."""

    kld: Array
    same_top: Array

    @staticmethod
    def of(exact: Array, found: Array) -> Closeness:
        """Of logits or log-probabilities [n, n_vocab] of P and Q."""
        from qwen35rt.convert.kl import compare_row

        p, q = exact.astype(np.float64), found.astype(np.float64)
        p -= p.max(-1, keepdims=True)
        pairs = [compare_row(a, b) for a, b in zip(p, q, strict=True)]
        return Closeness(np.array([k for k, _ in pairs]), np.array([s for _, s in pairs]))


@dataclass(frozen=True)
class Drift:
    """Both runtimes on one file against one reference; ``peer`` is None where there is no such runtime.

    ``groups``: positions that are not independent of each other have the same number; int [n].
    """

    file: str
    reference: str
    pages: str
    own: Closeness
    peer: Closeness | None
    groups: Array

    @property
    def less(self) -> tuple[float, float, float] | None:
        """Ours less the peer's mean divergence, and the bounds of its 95 % interval."""
        if self.peer is None:
            return None
        difference = self.own.kld - self.peer.kld
        return (float(difference.mean()), *interval(difference, self.groups))


def interval(values: Array, groups: Array) -> tuple[float, float]:
    """Bounds of the 95 % interval of the mean of values [n], by drawing groups of them with replacement."""
    _, group = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(group, values), np.bincount(group)
    drawn = np.random.default_rng(SEED).integers(len(sums), size=(DRAWS, len(sums)))
    low, high = np.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), ((1 - SHARE) / 2, (1 + SHARE) / 2))
    return float(low), float(high)


def runs_of(chunks: int, n: int) -> Array:
    """Group numbers of ``chunks`` times n positions: runs of neighbours in the same chunk."""
    per_chunk = -(-n // RUN)
    return (np.arange(chunks)[:, None] * per_chunk + np.arange(n) // RUN).ravel()


# ------------------------------------------------------------------------------------------------- models


def own_logits(path: Path, chunks: Array, exact: bool, threads: int) -> Array:
    """The project's logits after each token of ``chunks[:, n_ctx // 2 : -1]``: float32 [n, n_vocab].

    ``exact``: by the NumPy backend with float32 pages, else by the CPU backend as it is used.
    """
    import qwen35rt

    device, pages = ("reference", "f32") if exact else ("cpu", "f16")
    n_ctx = chunks.shape[1]
    with qwen35rt.load(path, device=device, threads=threads, n_ctx=n_ctx, kv_dtype=pages) as model:
        return np.concatenate([model.logits(chunk[:-1])[n_ctx // 2 :] for chunk in chunks])


def read_chunks(path: Path, text: str, n_ctx: int, count: int) -> tuple[Array, int]:
    """``count`` chunks [count, n_ctx] at equal distances in the text, and the size of the model's vocabulary."""
    import qwen35rt
    from qwen35rt.convert.text import cut_text

    with qwen35rt.load(path, device="cpu", threads=1, n_ctx=n_ctx) as model:
        found = cut_text(model.tokenizer, text, n_ctx)
        return found[np.unique(np.linspace(0, len(found) - 1, count).round().astype(int))], model.n_vocab


def quantise(base: Path, kind: str, path: Path, threads: int) -> None:
    """Write the base as a file of another type."""
    from qwen35rt.convert.mixes import MixOptions, find_mix
    from qwen35rt.convert.quantize import make_plan, run_plan
    from qwen35rt.model.gguf_file import open_gguf

    with open_gguf(base) as source:
        plan = make_plan(source, find_mix(kind), MixOptions(), allow_requantize=True)
        for note in plan.notes:
            print(f"{kind}: {note}", file=sys.stderr)
        run_plan(plan, path, threads)


def models(args: argparse.Namespace, with_peer: bool) -> Iterator[Drift]:
    """Files given, then the base in each type against itself in exact arithmetic, and against the base."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in args.text)
    first = args.model[0] if args.model else args.base
    chunks, n_vocab = read_chunks(first, text, args.ctx_size, args.chunks)
    groups = runs_of(len(chunks), args.ctx_size - 1 - args.ctx_size // 2)

    def against(path: Path, references: dict[str, Array]) -> Iterator[Drift]:
        own = own_logits(path, chunks, False, args.threads)
        peer = peer_logits(path, chunks, n_vocab, args.threads) if with_peer else None
        exact = {FILE: own_logits(path, chunks, True, args.threads)}
        for name, logits in (exact | references).items():
            theirs = None if peer is None else Closeness.of(logits, peer)
            yield Drift(path.stem, name, "f16", Closeness.of(logits, own), theirs, groups)

    for path in args.model:
        yield from against(path, {})
    if not args.type:
        return
    base = {BASE: own_logits(args.base, chunks, True, args.threads)}
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.type:
            path = Path(folder) / f"{args.base.stem}-{kind}.gguf"
            quantise(args.base, kind, path, args.threads)
            yield from against(path, base)
            path.unlink()


# ------------------------------------------------------------------------------------------------- oracle


def golden(folder: Path, threads: int) -> Iterator[Drift]:
    """Files of the oracle against HF's float32 logits of the same weights; llama.cpp kept float32 pages there."""
    import qwen35rt

    for kept in sorted((folder / "models").glob("*.golden.npz")):
        with np.load(kept) as z:
            of_file: dict[str, list[str]] = {}
            for variant, prompt in (k.split(".")[1:] for k in z.files if k.startswith("lcpp.")):
                of_file.setdefault(variant, []).append(prompt)
            for variant, prompts in of_file.items():
                path = kept.with_name(f"{kept.name.split('.')[0]}.{variant}.gguf")
                with qwen35rt.load(path, device="cpu", threads=threads, n_ctx=1024, kv_dtype="f32") as model:
                    own = np.concatenate([model.logits(z[f"tokens.{p}"])[z[f"rows.{p}"]] for p in prompts])
                exact, peer = (np.concatenate([z[f"{kind}.{variant}.{p}"] for p in prompts]) for kind in ("hf", "lcpp"))
                closeness = (Closeness.of(exact, own), Closeness.of(exact, peer))
                yield Drift(path.stem, FILE, "f32", *closeness, np.arange(len(own)))


# ------------------------------------------------------------------------------------------------- results


def cells(d: Drift) -> list[str]:
    """A row of the table."""
    found = [c for c in (d.own, d.peer) if c is not None]
    kld = [f"{c.kld.mean():.3g}" for c in found] + ["-"] * (2 - len(found))
    top = [f"{100 * c.same_top.mean():.1f} %" for c in found] + ["-"] * (2 - len(found))
    ratio = between = "-"
    if d.peer is not None and d.less is not None:
        mean = d.peer.kld.mean()
        ratio = f"{d.own.kld.mean() / mean:.2f}" if mean > 0 else "-"
        between = f"{d.less[1]:+.2g} to {d.less[2]:+.2g}"
    return [d.file, d.reference, str(len(d.groups)), *kld, ratio, between, *top]


def values(d: Drift) -> list[str]:
    """The last columns of a CSV row, from the file on."""
    less = d.less or ()
    numbers = [
        *(d.own.kld.mean(), d.peer.kld.mean() if d.peer else None),
        *(less or (None,) * 3),
        *(d.own.same_top.mean(), d.peer.same_top.mean() if d.peer else None),
    ]
    return [d.file, d.reference, d.pages, str(len(d.groups)), *("" if x is None else f"{x:.6g}" for x in numbers)]


def report(found: Iterator[Drift], path: Path, peer: str) -> None:
    """Print the table, and append its rows to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    common = [machine(), own_isa(), commit(), peer]
    between = "95 % interval of the difference"
    head = (
        *("file", "reference", "positions", *(f"KL, {n}" for n in NAMES), "ratio", between),
        *(f"same top token, {n}" for n in NAMES),
    )
    print("| " + " | ".join(head) + " |")
    print("|" + "|".join("---" if i < 2 else "--:" for i in range(len(head))) + "|", flush=True)
    with path.open("a", newline="", encoding="utf-8") as f:
        writer = csv.writer(f, lineterminator="\n")
        if fresh:
            writer.writerow(COLUMNS)
        for drift in found:
            print("| " + " | ".join(cells(drift)) + " |", flush=True)
            writer.writerow([time.strftime("%Y-%m-%dT%H:%M:%S"), *common, *values(drift)])
            f.flush()


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags and measure."""
    root = HERE.parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-m", "--model", action="append", type=Path, default=[], help="a file as it is; repeatable")
    parser.add_argument("-b", "--base", type=Path, help="GGUF file to quantise (default: the embedded model)")
    parser.add_argument("--type", action="append", help=f"of the base; repeatable (default without -m: {TYPES})")
    parser.add_argument("-f", "--text", action="append", type=Path, help="repeatable (default: README and docs)")
    parser.add_argument("-c", "--ctx-size", type=int, default=256, help="tokens of a chunk; the second half is scored")
    parser.add_argument("--chunks", type=int, default=8, help="at equal distances in the text")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--oracle", type=Path, help="folder of kept logits; nothing else is measured")
    parser.add_argument("--out", type=Path, help="CSV file (default: benchmarks/results/MACHINE-drift.csv)")
    args = parser.parse_args(argv)
    args.base = args.base or root / "src" / "qwen35rt" / "data" / "embedded.gguf"
    args.type = args.type or ([] if args.model else list(TYPES))
    args.text = args.text or [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    name = re.sub(r"[^a-z0-9]+", "-", machine().lower()).strip("-")
    path = args.out or HERE / "results" / f"{name}-drift.csv"
    if args.oracle:
        report(golden(args.oracle, args.threads), path, "kept logits")
        return
    with_peer = find_spec("xllamacpp") is not None
    if not with_peer:
        print("the xllamacpp wheel is not installed: nothing to compare with", file=sys.stderr)
    report(models(args, with_peer), path, peer_version() if with_peer else "")


if __name__ == "__main__":
    main()

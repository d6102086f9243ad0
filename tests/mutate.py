"""Child of test_mutations: opens damaged copies of a model file and runs the ones that load.

``python -m tests.mutate FILE SEED FIRST END`` prints the number of a mutation before it is tried, so that whoever
started this process knows which one ended it, and a JSON line at the end.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import sys
import tempfile
from pathlib import Path

import numpy as np

import qwen35rt
from qwen35rt import Model, errors

MOST_GROWTH = 64 << 20
# Beyond what the process has once the sound file ran: a runaway allocation becomes a MemoryError, which is a fault.
MOST_ADDRESS_SPACE = 1 << 30


def mutate(whole: bytes, seed: int, number: int) -> bytes:
    """One random change or a few: bits, bytes, length fields, cuts, insertions, removals; mostly in the header."""
    rng = np.random.default_rng([seed, number])
    header = whole.rfind(b".weight") + 64
    out = bytearray(whole)
    kinds = ("bit", "byte", "number", "cut", "insert", "remove")
    for _ in range(int(rng.choice([1, 2, 3], p=[0.7, 0.2, 0.1]))):
        at = int(rng.integers(4, header if rng.random() < 0.5 else len(whole)))
        match str(rng.choice(kinds, p=[0.2, 0.3, 0.3, 0.05, 0.08, 0.07])):
            case "bit":
                at = min(at, len(out) - 1)
                out[at] ^= 1 << int(rng.integers(0, 8))
            case "byte":
                at = min(at, len(out) - 1)
                out[at] ^= int(rng.integers(1, 256))
            case "number":
                _change_number(out, whole, rng, header)
            case "cut":
                del out[at:]
            case "insert":
                out[at:at] = rng.bytes(int(rng.integers(1, 40)))
            case _:
                del out[at : at + int(rng.integers(1, 40))]
        if len(out) < 8:
            break
    return bytes(out)


def _change_number(out: bytearray, whole: bytes, rng: np.random.Generator, header: int) -> None:
    """Overwrite a count, length, type, dimension, offset or value that stands before or behind a name of the header."""
    keys = rng.random() < 0.5
    pattern = (
        rb"general\.[a-z]+|qwen35(?:moe)?\.[a-z_.]+|tokenizer\.[a-z_.]+"
        if keys
        else rb"[a-z0-9_.]+\.weight|blk[a-z0-9_.]+"
    )
    names = list(re.finditer(pattern, whole[24:header]))
    name = names[int(rng.integers(0, len(names)))]
    start, end = 24 + name.start(), 24 + name.end()
    # Behind a key: value type, value or element type, count. Behind a tensor: dimensions, their number, type, offset.
    behind = end + int(rng.choice([0, 4, 4, 8] if keys else [0, 4, 8, 12, 20, 24, 28]))
    at = int(rng.choice([8, 16, start - 8, behind], p=[0.03, 0.03, 0.1, 0.84]))
    size = 4 if at == end else int(rng.choice([4, 8]))
    if at == end and keys:
        value = int(rng.integers(0, 14))
    else:
        odd = [0, 1, 2, 3, 31, 33, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
        now = int.from_bytes(out[at : at + size], "little")
        odd += [now + 1, max(now - 1, 0), now * 2, now // 2, now + 32, 0x7FC00000, 0x7F800000]  # also NaN and infinity
        value = odd[int(rng.integers(0, len(odd)))] % (1 << 8 * size)
    out[at : at + size] = value.to_bytes(size, "little")


def attempt(path: Path) -> str:
    """Load and run a file; -> what became of it. Anything but "ran" and the documented errors is raised."""
    try:
        model = qwen35rt.load(path, device="cpu", threads=1, n_batch=16)
    except errors.ModelFileError as e:
        return "refused" if str(e).strip() else "refused without a word"
    with model:
        try:
            done = answer(model)
        except errors.GenerationFailed:
            return "not finite"
        except errors.ContextLengthExceeded:
            return "small context"
        except errors.ModelFileError as e:
            if "tokenizer.ggml.merges makes" not in str(e):  # all else is found by load; merges, when they are used
                raise
            return "merges do not fit"
        most = min(2, model.n_ctx - done.usage.prompt_tokens)
        return "ran" if done.usage.completion_tokens == most or done.finish_reason == "stop" else "ran short"


def answer(model: Model) -> qwen35rt.Completion:
    """Two tokens through the chat template, or through plain text where the template is damaged."""
    if model.has_chat_template:
        try:
            return model.chat([{"role": "user", "content": "hello"}], max_tokens=2, temperature=0)
        except (errors.TemplateError, errors.ContextLengthExceeded):
            pass
    return model.generate("hello <|im_end|>", max_tokens=2, temperature=0)


def peak_bytes() -> int:
    """Peak resident memory of this process. ru_maxrss would start with that of the parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def main(file: str, seed: str, first: str, end: str) -> None:
    """Try mutations ``first`` .. ``end`` - 1."""
    logging.disable(logging.CRITICAL)
    whole = Path(file).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(whole)
        if attempt(path) != "ran":
            raise SystemExit("the file does not run before it is damaged")
        statm = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (statm + MOST_ADDRESS_SPACE,) * 2)
        before = peak_bytes()
        counts: dict[str, int] = {}
        for number in range(int(first), int(end)):
            print(number, flush=True)
            path.unlink()  # a new file: the old one may still be mapped
            path.write_bytes(mutate(whole, int(seed), number))
            outcome = attempt(path)
            counts[outcome] = counts.get(outcome, 0) + 1
            if peak_bytes() - before > MOST_GROWTH + len(whole):
                raise SystemExit(f"the peak of memory grew by {(peak_bytes() - before) >> 20} MiB")
    print(json.dumps(counts | {"growth": peak_bytes() - before}))


if __name__ == "__main__":
    main(*sys.argv[1:])

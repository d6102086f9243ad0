"""``qwen35rt doctor``: what this machine offers and whether each part works. Exit code 1 if nothing can run."""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="show log lines, and where an error came from")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    found = examine()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        for section, values in found.items():
            print(f"{section}:")
            for name, value in values.items():
                print(f"  {name:<18} {_text(value)}")
    return 0 if found["run"]["works"] else 1


def examine() -> dict[str, dict[str, Any]]:
    """Everything that doctor shows, as plain data."""
    from .. import __version__
    from ..config import environment
    from ..cpu_count import usable_cpus
    from ..machine import cpu_name, gpu_state, memory_bytes, versions

    count = usable_cpus()
    total, available = memory_bytes()
    env = environment()
    set_names = {
        f"QWEN35RT_{n.upper()}": v for n in ("isa", "threads", "n_gpu_layers") if (v := getattr(env, n)) is not None
    }
    return {
        "qwen35rt": {"version": __version__, "python": platform.python_version(), "system": platform.platform()},
        "cpu": {
            "name": cpu_name(),
            **_levels(),
            "threads": count.threads,
            "decided by": count.reason,
            "affinity": count.affinity,
            "cgroup quota": count.quota,
            "physical cores": count.physical,
        },
        "memory": {"total": f"{total / 2**30:.1f} GiB", "available": f"{available / 2**30:.1f} GiB"},
        "gpu": gpu_state(),
        "packages": versions(),
        "settings": set_names,
        "run": _try_embedded(),
    }


def _levels() -> dict[str, Any]:
    try:
        from .. import _native
    except ImportError as e:
        return {"levels": f"the compiled part cannot be loaded: {e}"}
    return {"levels": _native.isa_levels(), "best level": _native.best_isa()}


def _try_embedded() -> dict[str, Any]:
    """Run a few tokens of the embedded model on the device that auto chooses."""
    from ..api import load

    try:
        with load() as model:
            done = model.generate("x", max_tokens=4, temperature=0.0)
            layers = f"{model.parts.choice.gpu_layers} of {model.parts.source.n_layers} layers"
            found = {"works": bool(done.ids), "device": model.device_description, "on a gpu": layers}
            return found | {"on_gpu": done.on_gpu}
    except Exception as e:  # doctor reports faults, it does not have them
        return {"works": False, "error": f"{type(e).__name__}: {e}"}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)

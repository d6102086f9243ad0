"""Fetches a model from Hugging Face: which file of a repository is meant, and its download. Loads no model."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError, ModelFileError
from .parser import nearest

_PREFERRED = ("Q4_K_M", "Q8_0")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)


def fetch(spec: str, file: str | None = None) -> Path:
    """Download ``user/repo[:quant]``, or only ``file`` of it, unless it is in the local cache; -> path (first part).

    HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE act as they do in huggingface-hub, whose progress bar is shown
    on a terminal.
    Raises ConfigError for a malformed spec, ModelFileError for what cannot be had.
    """
    repo, _, quant = spec.partition(":")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repo):
        raise ConfigError(f"-hf {spec}: USER/REPO or USER/REPO:QUANT is needed")
    from huggingface_hub import errors, hf_hub_download, snapshot_download, try_to_load_from_cache

    offline = False
    try:
        names = _list(repo)
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as e:
        raise ModelFileError(_refused(repo, isinstance(e, errors.GatedRepoError))) from e
    except Exception as e:
        # No network, or a hub that fails: a copy from before is as good.
        try:
            folder = Path(snapshot_download(repo, local_files_only=True))
        except Exception:
            raise ModelFileError(
                f"{repo}: the hub cannot be reached ({_cause(e)}) and there is no copy from before"
            ) from e
        print(f"qwen35rt: the hub cannot be reached ({_cause(e)}); using the copy from before", file=sys.stderr)
        names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.gguf"))
        offline = True
    chosen = choose_files(repo, names, quant, file)
    try:
        paths = []
        for name in chosen:
            if not isinstance(try_to_load_from_cache(repo, name), str):
                print(f"qwen35rt: downloading {name} of {repo}", file=sys.stderr)
            paths.append(Path(hf_hub_download(repo, name, local_files_only=offline)))
    except errors.GatedRepoError as e:
        raise ModelFileError(_refused(repo, gated=True)) from e
    except Exception as e:
        raise ModelFileError(f"{repo}: the download of {', '.join(chosen)} failed ({_cause(e)}); run it again") from e
    return paths[0]


def choose_files(repo: str, names: Sequence[str], quant: str = "", file: str | None = None) -> list[str]:
    """The file that is meant, or all parts of a split model in order. Raises ModelFileError naming what there is."""
    models = sorted(
        n
        for n in names
        if n.lower().endswith(".gguf") and not n.rsplit("/", 1)[-1].lower().startswith(("mmproj", "mtp-"))
    )
    heads = [n for n in models if not (m := _PART.search(n)) or int(m[1]) == 1]
    found: str | None
    if file is not None:
        if file not in names:
            raise ModelFileError(f"{repo} has no file '{file}'{nearest(file, heads)}; it has {_some(heads)}")
        found = file
    elif quant:
        found = _with_quant(heads, quant)
        if found is None:
            raise ModelFileError(f"{repo} has no GGUF file of type '{quant}'; it has {_some(heads)}")
    else:
        found = next((f for q in _PREFERRED if (f := _with_quant(heads, q))), heads[0] if heads else None)
        if found is None:
            raise ModelFileError(f"{repo} has no GGUF file; name a repository whose name ends in -GGUF")
    part = _PART.search(found)
    if not part:
        return [found]
    stem, count = found[: part.start()], int(part[2])
    parts = [n for n in models if (m := _PART.search(n)) and n[: m.start()] == stem and int(m[2]) == count]
    if len(parts) != count:
        raise ModelFileError(f"{repo}: {stem} has {len(parts)} of its {count} parts")
    return parts


def _with_quant(names: Sequence[str], quant: str) -> str | None:
    """The first name whose type is ``quant``: between separators, in any case."""
    pattern = re.compile(rf"(^|[-._/]){re.escape(quant)}(-\d{{5}}-of-\d{{5}})?\.gguf$", re.IGNORECASE)
    return next((n for n in names if pattern.search(n)), None)


def _list(repo: str) -> list[str]:
    from huggingface_hub import HfApi

    return [file.rfilename for file in HfApi().model_info(repo).siblings or ()]


def _refused(repo: str, gated: bool) -> str:
    if gated:
        return f"{repo}: access must be asked for on its page; then set HF_TOKEN or run 'hf auth login'"
    return f"{repo}: no such repository, or a private one; for a private one set HF_TOKEN or run 'hf auth login'"


def _cause(e: Exception) -> str:
    text = " ".join(str(e).split())
    return f"{type(e).__name__}: {text[:200]}" if text else type(e).__name__


def _some(names: Sequence[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) + more) or "no GGUF file"

"""The tokenizer files and chat template of a checkpoint -> the tokenizer.* keys of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import ModelFileError, UnsupportedModel
from ..tokenizer.bpe import PATTERNS
from ..tokenizer.vocab import CONTROL, NORMAL, PREFIX, UNUSED, USER_DEFINED, USER_MARKERS
from .checkpoint import Checkpoint

# Classes whose vocab.json and merges.txt come without the pattern that cuts text.
_CLASSES = {
    "Qwen3_5Tokenizer": "qwen35",
    "Qwen3_5TokenizerFast": "qwen35",
    "Qwen2Tokenizer": "qwen2",
    "Qwen2TokenizerFast": "qwen2",
}
_FILE, _CONFIG = "tokenizer.json", "tokenizer_config.json"


def tokenizer_metadata(checkpoint: Checkpoint, n_vocab: int, configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The keys, with tokens padded to ``n_vocab``; ``configs`` may name special ids, the first that does counts.

    Raises ModelFileError for files that are missing or contradict each other, UnsupportedModel for another kind of
    tokenizer.
    """
    settings = checkpoint.json(_CONFIG) or {}
    file = checkpoint.json(_FILE)
    where = f"{checkpoint.folder / _FILE}"
    if file is not None:
        vocab, merges, added = _from_tokenizer_json(where, file)
        pre = _pre_tokenizer(where, file)
    else:
        vocab, merges = _from_plain_files(checkpoint)
        where = str(checkpoint.folder / _CONFIG)
        added = _added_of_config(where, settings)
        pre = _pre_of_config(where, settings)
    tokens, types = _tokens(where, vocab, added, n_vocab)
    meta: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
    }
    ids = {token: i for i, token in enumerate(tokens)}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        found = _special(f"{checkpoint.folder}", name, settings, configs, ids)
        if found is not None:
            meta[f"{key}_token_id"] = found
    meta["add_bos_token"] = settings.get("add_bos_token") is True
    if meta["add_bos_token"] and "bos_token_id" not in meta:
        raise ModelFileError(f"{checkpoint.folder / _CONFIG}: 'add_bos_token' is true and no file names the token")
    keys = {PREFIX + key: value for key, value in meta.items()}
    template = chat_template(checkpoint, settings)
    if template:
        keys["tokenizer.chat_template"] = template
    return keys


def chat_template(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> str | None:
    """The template, from the file that transformers would take it from; of several the default one."""
    text = checkpoint.text("chat_template.jinja")
    if text is not None:
        return text
    own = checkpoint.json("chat_template.json")
    place, found = ("chat_template.json", own) if own is not None else (_CONFIG, settings)
    value = found.get("chat_template")
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelFileError(
            f"{checkpoint.folder / place}: 'chat_template' is neither a text nor a list with a default"
        )
    return value


def _from_tokenizer_json(
    where: str, file: Mapping[str, Any]
) -> tuple[dict[str, int], list[str], list[tuple[int, str, bool]]]:
    model = file.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise ModelFileError(f"{where}: 'model.vocab' is not there; only BPE tokenizers can be converted")
    for name, need in (
        ("type", ("BPE", None)),
        ("byte_fallback", (False, None)),
        ("continuing_subword_prefix", ("", None)),
    ):
        if model.get(name) not in need:
            raise UnsupportedModel(f"{where}: 'model.{name}' is {model[name]!r}; {need[0]!r} is needed")
    normalizer = file.get("normalizer")
    if normalizer is not None and normalizer != {"type": "NFC"}:
        raise UnsupportedModel(f"{where}: 'normalizer' is {normalizer!r:.60}; NFC is needed")
    merges = [_merge(where, m) for m in _list(where, "model.merges", model.get("merges"))]
    added = []
    for entry in _list(where, "added_tokens", file.get("added_tokens") or []):
        if not isinstance(entry, dict) or type(entry.get("id")) is not int or not isinstance(entry.get("content"), str):
            raise ModelFileError(f"{where}: 'added_tokens' holds {entry!r:.60}; an id and a content are needed")
        added.append((entry["id"], entry["content"], entry.get("special") is True))
    return model["vocab"], merges, added


def _from_plain_files(checkpoint: Checkpoint) -> tuple[dict[str, int], list[str]]:
    vocab, text = checkpoint.json("vocab.json"), checkpoint.text("merges.txt")
    if vocab is None or text is None:
        raise ModelFileError(f"{checkpoint.folder}: no tokenizer: neither {_FILE} nor vocab.json with merges.txt")
    where = str(checkpoint.folder / "merges.txt")
    lines = [line for line in text.split("\n") if line and not line.startswith("#version")]
    return vocab, [_merge(where, line) for line in lines]


def _merge(where: str, merge: Any) -> str:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if (
        not isinstance(parts, list)
        or len(parts) != 2
        or not all(isinstance(p, str) and p and " " not in p for p in parts)
    ):
        raise ModelFileError(f"{where}: merge {merge!r:.60} is not of the form 'left right'")
    return f"{parts[0]} {parts[1]}"


def _list(where: str, name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ModelFileError(f"{where}: '{name}' is not a list")
    return value


def _pre_tokenizer(where: str, file: Mapping[str, Any]) -> str:
    """The name of the pattern that cuts text, found by the pattern."""
    steps = list(_steps(file.get("pre_tokenizer")))
    patterns = [s["pattern"]["Regex"] for s in steps if isinstance(s.get("pattern"), dict) and "Regex" in s["pattern"]]
    plain = all(s.get("type") in ("Split", "ByteLevel") and not s.get("add_prefix_space") for s in steps)
    return _named(where, patterns[0] if len(patterns) == 1 and plain else file.get("pre_tokenizer"))


def _steps(step: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(step, dict) and step.get("type") == "Sequence":
        for inner in step.get("pretokenizers", ()):
            yield from _steps(inner)
    elif isinstance(step, dict):
        yield step


def _named(where: str, pattern: Any) -> str:
    for name, known in PATTERNS.items():
        if pattern == known:
            return name
    raise UnsupportedModel(
        f"{where}: the pre-tokenizer cuts text by {pattern!r:.100}, which is not that of {' or '.join(PATTERNS)}"
    )


def _pre_of_config(where: str, settings: Mapping[str, Any]) -> str:
    if settings.get("pretokenize_regex") is not None:
        return _named(where, settings["pretokenize_regex"])
    name = settings.get("tokenizer_class")
    if name not in _CLASSES:
        raise UnsupportedModel(
            f"{where}: 'tokenizer_class' is {name!r:.60}; without {_FILE} one of {', '.join(_CLASSES)}"
        )
    return _CLASSES[name]


def _added_of_config(where: str, settings: Mapping[str, Any]) -> list[tuple[int, str, bool]]:
    entries = settings.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise ModelFileError(f"{where}: 'added_tokens_decoder' is not an object")
    added = []
    for i, entry in entries.items():
        if not i.isdecimal() or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise ModelFileError(f"{where}: 'added_tokens_decoder' holds {i!r}: {entry!r:.60}; a content is needed")
        added.append((int(i), entry["content"], entry.get("special") is True))
    return added


def _tokens(
    where: str, vocab: Mapping[str, Any], added: Sequence[tuple[int, str, bool]], n_vocab: int
) -> tuple[list[str], list[int]]:
    tokens: list[str | None] = [None] * n_vocab
    types = [UNUSED] * n_vocab

    def put(i: Any, token: str, kind: int) -> None:
        if type(i) is not int or not 0 <= i < n_vocab:
            raise ModelFileError(
                f"{where}: token {token!r:.60} has the id {i!r:.20}, config.json's vocab_size is {n_vocab}"
            )
        if tokens[i] not in (None, token):
            raise ModelFileError(f"{where}: id {i} is that of {tokens[i]!r:.60} and of {token!r:.60}")
        tokens[i], types[i] = token, kind

    for token, i in vocab.items():
        put(i, token, NORMAL)
    for i, token, special in added:
        # Some control tokens lack the flag, and files saved again give it to all.
        control = special or (token.startswith("<|") and token.endswith("|>"))
        put(i, token, CONTROL if control and token not in USER_MARKERS else USER_DEFINED)
    return [f"[PAD{i}]" if token is None else token for i, token in enumerate(tokens)], types


def _special(
    where: str, name: str, settings: Mapping[str, Any], configs: Sequence[Mapping[str, Any]], ids: Mapping[str, int]
) -> int | None:
    """The id of a token with a role: the tokenizer's own settings come before the model's."""
    token = settings.get(f"{name}_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None:
        if text not in ids:
            raise ModelFileError(f"{where}/{_CONFIG}: '{name}_token' is {text!r:.60}, which is no token")
        return ids[text]
    for config in configs:
        value = config.get(f"{name}_token_id")
        value = value[0] if isinstance(value, list) and value else value
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < len(ids):
            raise ModelFileError(f"{where}: '{name}_token_id' is {value!r:.60}, outside 0..{len(ids) - 1}")
        return value
    return None

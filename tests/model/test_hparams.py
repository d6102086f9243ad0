"""Hyperparameters: what is read, what is derived, what is refused."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType

from qwen35rt.errors import ModelFileError, UnsupportedModel
from qwen35rt.model.gguf_file import open_gguf
from qwen35rt.model.hparams import HParams, read_hparams
from tests.fixtures import TinySpec, tiny_metadata, tiny_tensors, write_gguf, write_tiny


def read(path: Path) -> HParams:
    return read_hparams(open_gguf(path))


def tiny(tmp_path: Path, kind: str = "dense", **options: Any) -> HParams:
    return read(write_tiny(tmp_path / "t.gguf", kind, tokenizer=False, **options))


def test_dense(tiny_dense: Path) -> None:
    s = TinySpec()
    assert asdict(read(tiny_dense)) == {
        "arch": "qwen35",
        "n_layer": 4,
        "n_mtp": 0,
        "n_ctx_train": 4096,
        "n_embd": s.n_embd,
        "n_ff": s.n_ff,
        "n_head": s.n_head,
        "n_head_kv": s.n_head_kv,
        "head_dim": s.head_dim,
        "rms_eps": pytest.approx(1e-6),
        "rope_theta": 1e7,
        "rope_dim": s.rope_dim,
        "rope_sections": (2, 1, 1, 0),
        "full_attention": (False, False, False, True),
        "conv_kernel": 4,
        "ssm_state": s.ssm_state,
        "ssm_k_heads": s.ssm_k_heads,
        "ssm_v_heads": s.ssm_v_heads,
        "n_expert": 0,
        "n_expert_used": 0,
        "n_ff_expert": 0,
        "n_ff_shared": 0,
        "n_vocab": 320,
        "tied": False,
    }


def test_moe(tiny_moe: Path) -> None:
    hp = read(tiny_moe)
    assert (hp.arch, hp.n_ff, hp.moe) == ("qwen35moe", 0, True)
    assert (hp.n_expert, hp.n_expert_used, hp.n_ff_expert, hp.n_ff_shared) == (8, 2, 32, 64)


def test_oracle_models(oracle: Path) -> None:
    hp = read(oracle / "models" / "nano.f32.gguf")
    assert hp.full_attention == (False, True, False, False)  # only the array of recurrent layers says so
    assert not hp.tied
    hp = read(oracle / "models" / "wide.q4_k_m.gguf")
    assert (hp.head_dim, hp.ssm_state, hp.ssm_v_heads, hp.rope_sections) == (256, 128, 6, (11, 11, 10, 0))
    hp = read(oracle / "models" / "moemtp.q8_0.gguf")
    assert (hp.n_layer, hp.n_mtp, hp.full_attention, hp.tied) == (2, 1, (False, True), True)


def test_b42_the_mtp_block_is_not_a_layer(tmp_path: Path) -> None:
    hp = tiny(tmp_path, mtp=True)
    assert (hp.n_layer, hp.n_mtp, len(hp.full_attention)) == (4, 1, 4)
    hp = tiny(tmp_path, metadata={"qwen35.attention.recurrent_layers": [True, True, True, False, False]}, mtp=True)
    assert hp.full_attention == (False, False, False, True)


def test_b42_two_mtp_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"nextn_predict_layers' is 2; .* more than one MTP block"):
        tiny(tmp_path, metadata={"qwen35.nextn_predict_layers": 2})


def test_recurrent_layers_win_over_the_interval(tmp_path: Path) -> None:
    key = "qwen35.attention.recurrent_layers"
    assert tiny(tmp_path, metadata={key: [True, False, True, True]}).full_attention == (False, True, False, False)
    assert tiny(tmp_path, metadata={"qwen35.full_attention_interval": 2}).full_attention == (False, True) * 2
    assert tiny(tmp_path, metadata={"qwen35.full_attention_interval": None}).full_attention == (False,) * 3 + (True,)
    for wrong in ([True] * 3, [True] * 5, [1, 0, 1, 1], ["x"] * 4, True):
        with pytest.raises(ModelFileError, match=key):
            tiny(tmp_path, metadata={key: wrong})
    with pytest.raises(ModelFileError, match=r"MTP block recurrent"):
        tiny(tmp_path, metadata={key: [True] * 5}, mtp=True)


@pytest.mark.parametrize("kind", [k for k in GGUFValueType if "INT" in k.name])
def test_any_integer_type_is_accepted(tmp_path: Path, kind: GGUFValueType) -> None:
    meta = {
        "qwen35.embedding_length": (64, kind),
        "qwen35.rope.dimension_sections": ([2, 1, 1, 0], GGUFValueType.ARRAY, kind),
    }
    hp = tiny(tmp_path, metadata=meta)
    assert (hp.n_embd, hp.rope_sections) == (64, (2, 1, 1, 0))


def test_sizes_are_taken_from_shapes_where_keys_lack(tmp_path: Path) -> None:
    assert tiny(tmp_path, metadata={"qwen35.feed_forward_length": None}).n_ff == 96
    lacking = {f"qwen35moe.expert_{k}feed_forward_length": None for k in ("", "shared_")}
    hp = tiny(tmp_path, "moe", metadata=lacking)
    assert (hp.n_ff_expert, hp.n_ff_shared) == (32, 64)
    hp = tiny(tmp_path, metadata={f"qwen35.attention.{k}_length": None for k in ("key", "value")})
    assert hp.head_dim == 32  # 64 / 2
    assert tiny(tmp_path, n_head_kv=2, metadata={"qwen35.attention.head_count_kv": None}).n_head_kv == 2
    assert tiny(tmp_path, metadata={"qwen35.rope.freq_base": None}).rope_theta == 10_000
    assert tiny(tmp_path, tied=True).tied


def test_one_value_per_layer(tmp_path: Path) -> None:
    key = "qwen35.attention.head_count"
    assert tiny(tmp_path, metadata={key: [2, 2, 2, 2]}).n_head == 2
    with pytest.raises(UnsupportedModel, match=f"'{key}' differs between layers"):
        tiny(tmp_path, metadata={key: [2, 2, 2, 4]})
    for wrong in ([2, 2, 2], [2] * 5, [2, 2, 2, 0], [2.0] * 4):
        with pytest.raises(ModelFileError, match=key):
            tiny(tmp_path, metadata={key: wrong})


REQUIRED = (
    "block_count context_length embedding_length attention.head_count attention.layer_norm_rms_epsilon "
    "rope.dimension_count rope.dimension_sections ssm.conv_kernel ssm.state_size ssm.group_count ssm.time_step_rank "
    "ssm.inner_size"
)


@pytest.mark.parametrize("name", [*REQUIRED.split(), "moe.expert_count", "moe.expert_used_count"])
def test_a_missing_key_is_named(tmp_path: Path, name: str) -> None:
    kind, key = ("moe", f"qwen35{name}") if name.startswith("moe.") else ("dense", f"qwen35.{name}")
    with pytest.raises(ModelFileError, match=f"t.gguf: key '{key}' is missing"):
        tiny(tmp_path, kind, metadata={key: None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("block_count", 2**31),
        ("block_count", -4),
        ("block_count", 4.0),
        ("block_count", "4"),
        ("block_count", True),
        ("block_count", [4]),
        ("context_length", 0),
        ("embedding_length", 2**30),
        ("feed_forward_length", -1),
        ("attention.head_count_kv", 0),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("attention.layer_norm_rms_epsilon", 0.0),
        ("attention.layer_norm_rms_epsilon", -1e-6),
        ("attention.layer_norm_rms_epsilon", "1e-6"),
        ("attention.value_length", 16),
        ("rope.freq_base", float("inf")),
        ("rope.freq_base", 0.0),
        ("rope.freq_base", False),
        ("rope.dimension_count", 7),
        ("rope.dimension_count", 34),
        ("rope.dimension_count", 0),
        ("rope.dimension_sections", [2, 1, 1]),
        ("rope.dimension_sections", [2, 1, 0, 1]),
        ("rope.dimension_sections", [2, 2, 1, 0]),
        ("rope.dimension_sections", [6, -1, -1, 0]),
        ("rope.dimension_sections", [2.0, 1.0, 1.0, 0.0]),
        ("rope.dimension_sections", 4),
        ("rope.scaling.type", 1),
        ("full_attention_interval", 0),
        ("nextn_predict_layers", -1),
        ("ssm.conv_kernel", 1),
        ("ssm.inner_size", 63),
        ("ssm.state_size", 0),
    ],
)
def test_an_impossible_value_is_refused_by_key(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=f"t.gguf: key 'qwen35.{key}'"):
        tiny(tmp_path, metadata={f"qwen35.{key}": value})


def test_contradicting_values_are_refused(tmp_path: Path) -> None:
    for key, value, text in (
        ("attention.head_count", 3, "key/value heads|32 heads"),
        ("ssm.group_count", 3, "4 value heads .* 3 key heads"),
        ("expert_used_count", 9, "expert_used_count' is 9; an integer from 1 to 8"),
    ):
        kind, arch = ("moe", "qwen35moe") if "expert" in key else ("dense", "qwen35")
        meta = {f"{arch}.{key}": value, f"{arch}.attention.head_count_kv": 2}
        with pytest.raises(ModelFileError, match=text):
            tiny(tmp_path, kind, metadata=meta)
    with pytest.raises(ModelFileError, match=r"leaves no layer"):
        tiny(tmp_path, metadata={"qwen35.block_count": 1, "qwen35.nextn_predict_layers": 1})


def test_scaled_rope_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"rope\.scaling\.type' is 'yarn'"):
        tiny(tmp_path, metadata={"qwen35.rope.scaling.type": "yarn"})
    assert tiny(tmp_path, metadata={"qwen35.rope.scaling.type": "none"}).rope_dim == 8


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "t.gguf", metadata={"tokenizer.ggml.tokens": ["x"] * 321})
    with pytest.raises(ModelFileError, match=r"tokens' has 321 tokens, .* 320 rows"):
        read(path)


@pytest.mark.parametrize("value", ["foo", "", 5, None, True, ["qwen35"], "QWEN35", "x" * 1000])
def test_b47_unknown_architecture(tmp_path: Path, value: Any) -> None:
    """B47: the message has the value and the supported list."""
    with pytest.raises(UnsupportedModel, match=r"supported: qwen35, qwen35moe") as e:
        tiny(tmp_path, metadata={"general.architecture": value})
    shown = {None: "missing", "": "''", 5: "5", "foo": "'foo'", "QWEN35": "'QWEN35'"}
    assert shown.get(
        value if isinstance(value, str | int) or value is None else 0, "general" if not value else ""
    ) in str(e.value)
    assert len(str(e.value)) < 400


@pytest.mark.parametrize(("arch", "hint"), [("qwen3next", "Next"), ("qwen4exp", "later"), ("clip", "mmproj")])
def test_b47_relatives_are_refused_by_name(tmp_path: Path, arch: str, hint: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{arch}' is not supported .*{hint}"):
        tiny(tmp_path, metadata={"general.architecture": arch})


def test_a_vision_file_is_refused(oracle: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"mmproj"):
        read(oracle / "vision" / "mmproj.f16.gguf")


def test_a_file_with_only_the_mtp_block_is_refused(tmp_path: Path) -> None:
    spec = TinySpec(mtp=True)
    tensors = {n: t for n, t in tiny_tensors(spec).items() if not n.startswith("blk.") or n.startswith("blk.4.")}
    with pytest.raises(UnsupportedModel, match=r"only the MTP block"):
        read(write_gguf(tmp_path / "mtp-x.gguf", tiny_metadata(spec, None, None), tensors))

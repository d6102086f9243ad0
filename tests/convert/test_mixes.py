"""Which format each tensor gets: equal to files that llama.cpp made, and to its rules at real layer counts."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from qwen35rt.convert.mixes import (
    ALIASES,
    MIXES,
    Choice,
    MixOptions,
    choose,
    find_format,
    find_mix,
    fitting,
    parse_tensor_type,
)
from qwen35rt.errors import ConfigError
from qwen35rt.formats import BY_NAME, FILE_TYPES
from qwen35rt.model.gguf_file import open_gguf
from qwen35rt.model.hparams import HParams, read_hparams

from ..oracle import MODELS, needs_oracle

Shapes = dict[str, tuple[int, ...]]
Q4_K, Q5_K, Q6_K, Q8_0 = (BY_NAME[n] for n in ("Q4_K", "Q5_K", "Q6_K", "Q8_0"))


def numbers(layers: int = 32, mtp: int = 0, tied: bool = False, heads: int = 16, experts: int = 0) -> HParams:
    """The 9B's numbers but for the given ones; with experts those of the 35B-A3B."""
    return HParams(
        arch="qwen35moe" if experts else "qwen35",
        n_layer=layers,
        n_mtp=mtp,
        n_ctx_train=262_144,
        n_embd=2048 if experts else 4096,
        n_ff=0 if experts else 12_288,
        n_head=heads,
        n_head_kv=2 if experts else 4,
        head_dim=256,
        rms_eps=1e-6,
        rope_theta=1e7,
        rope_dim=64,
        rope_sections=(11, 11, 10, 0),
        full_attention=tuple((i + 1) % 4 == 0 for i in range(layers)),
        conv_kernel=4,
        ssm_state=128,
        ssm_k_heads=16,
        ssm_v_heads=32,
        n_expert=experts,
        n_expert_used=8 if experts else 0,
        n_ff_expert=512 if experts else 0,
        n_ff_shared=512 if experts else 0,
        n_vocab=248_320,
        tied=tied,
    )


def shapes(hp: HParams) -> Shapes:
    """Names and shapes of such a model's tensors."""
    n, d = hp.n_embd, hp.ssm_state
    found: Shapes = {"token_embd.weight": (n, hp.n_vocab), "output_norm.weight": (n,)}
    if not hp.tied:
        found["output.weight"] = (n, hp.n_vocab)
    for i in range(hp.n_layer + hp.n_mtp):
        b = f"blk.{i}."
        found[b + "attn_norm.weight"] = (n,)
        if i >= hp.n_layer or hp.full_attention[i]:
            found[b + "attn_q.weight"] = (n, 2 * hp.n_head * hp.head_dim)
            found[b + "attn_k.weight"] = found[b + "attn_v.weight"] = (n, hp.n_head_kv * hp.head_dim)
            found[b + "attn_output.weight"] = (hp.n_head * hp.head_dim, n)
            found[b + "attn_q_norm.weight"] = (hp.head_dim,)
        else:
            found[b + "attn_qkv.weight"] = (n, hp.conv_channels)
            found[b + "attn_gate.weight"] = (n, hp.ssm_v_heads * d)
            found[b + "ssm_alpha.weight"] = found[b + "ssm_beta.weight"] = (n, hp.ssm_v_heads)
            found[b + "ssm_conv1d.weight"] = (hp.conv_kernel, hp.conv_channels)
            found[b + "ssm_a"] = found[b + "ssm_dt.bias"] = (hp.ssm_v_heads,)
            found[b + "ssm_out.weight"] = (hp.ssm_v_heads * d, n)
        if hp.n_expert:
            e, f = hp.n_expert, hp.n_ff_expert
            found[b + "ffn_gate_inp.weight"] = (n, e)
            found[b + "ffn_gate_inp_shexp.weight"] = (n, 1)
            found[b + "ffn_gate_exps.weight"] = found[b + "ffn_up_exps.weight"] = (n, f, e)
            found[b + "ffn_down_exps.weight"] = (f, n, e)
            found[b + "ffn_gate_shexp.weight"] = found[b + "ffn_up_shexp.weight"] = (n, hp.n_ff_shared)
            found[b + "ffn_down_shexp.weight"] = (hp.n_ff_shared, n)
        else:
            found[b + "ffn_gate.weight"] = found[b + "ffn_up.weight"] = (n, hp.n_ff)
            found[b + "ffn_down.weight"] = (hp.n_ff, n)
        if i >= hp.n_layer:
            found[b + "nextn.eh_proj.weight"] = (2 * n, n)
            found[b + "nextn.enorm.weight"] = (n,)
    return found


def named(choices: Mapping[str, Choice]) -> dict[str, str]:
    """Names of the formats of the tensors that change."""
    return {name: c.format.name for name, c in choices.items() if c.format}


def chosen(mix: str, hp: HParams, options: MixOptions | None = None) -> dict[str, str]:
    """Names of the formats of a model's tensors."""
    return named(choose(find_mix(mix), shapes(hp), hp, options or MixOptions()))


def layers_with(found: Mapping[str, str], part: str, form: str) -> list[int]:
    """Layers whose tensors of this name have the format."""
    return [int(n.split(".")[1]) for n, f in found.items() if n.startswith("blk.") and part in n and f == form]


@needs_oracle
@pytest.mark.parametrize(
    ("file", "mix"),
    [
        ("dense.q4_k_m", "Q4_K_M"),
        ("dense.q8_0", "Q8_0"),
        ("dense.q4_0", "Q4_0"),
        ("wide.q4_k_m", "Q4_K_M"),
        ("moek.q4_k_m", "Q4_K_M"),
        ("moemtp.q8_0", "Q8_0"),
    ],
)
def test_equal_to_a_file_of_llama_cpp(file: str, mix: str) -> None:
    with open_gguf(MODELS / f"{file}.gguf") as f:
        choices = choose(find_mix(mix), {n: t.shape for n, t in f.tensors.items()}, read_hparams(f), MixOptions())
        assert f.get_int("general.file_type") == find_mix(mix).file_type
        want = {n: t.format.name for n, t in f.tensors.items()}
    # Tensors that stay are F32 in the source.
    assert {n: c.format.name if c.format else "F32" for n, c in choices.items()} == want
    assert all(c.note is None for c in choices.values())


def test_example_of_32_layers() -> None:
    found = chosen("Q4_K_M", numbers(32))
    four = [4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26]
    assert layers_with(found, "ffn_down", "Q4_K") == four
    assert layers_with(found, "ffn_down", "Q6_K") == [i for i in range(32) if i not in four]
    assert layers_with(found, "attn_qkv", "Q4_K") == [i for i in four if i % 4 != 3]
    assert layers_with(found, "attn_v.", "Q4_K") == [i for i in four if i % 4 == 3]
    assert found["output.weight"] == "Q6_K"
    assert found["token_embd.weight"] == found["blk.0.ssm_alpha.weight"] == found["blk.3.attn_k.weight"] == "Q4_K"
    assert layers_with(chosen("Q5_K_M", numbers(32)), "ffn_down", "Q5_K") == four


def test_the_layers_of_a_model_of_64() -> None:
    found = chosen("Q4_K_M", numbers(64, heads=24))
    six = [i for i in range(64) if i < 8 or i >= 56 or (i - 8) % 3 == 2]
    assert layers_with(found, "ffn_down", "Q6_K") == six
    assert sorted(layers_with(found, "attn_qkv", "Q6_K") + layers_with(found, "attn_v.", "Q6_K")) == six
    small = chosen("Q4_K_S", numbers(64, heads=24))
    assert layers_with(small, "ffn_down", "Q5_K") == list(range(8))
    assert layers_with(small, "attn_qkv", "Q5_K") == [0, 1, 2]
    assert layers_with(small, "attn_v.", "Q5_K") == [3]
    three = chosen("Q3_K_M", numbers(64, heads=24))
    assert layers_with(three, "ffn_down", "Q5_K") == list(range(4))
    assert layers_with(three, "attn_qkv", "Q5_K") == [0, 1]
    assert set(layers_with(three, "attn_output", "Q4_K")) == {i for i in range(64) if i % 4 == 3}
    assert {f for n, f in three.items() if "ffn_up" in n or "attn_gate" in n} == {"Q3_K"}


def test_the_mtp_block_counts_as_a_layer() -> None:
    hp = numbers(31, mtp=1)
    found = chosen("Q4_K_M", hp)
    assert found == chosen("Q4_K_M", numbers(32)) | {"blk.31.nextn.eh_proj.weight": "Q4_K"} | {
        n: f for n, f in found.items() if n.startswith("blk.31.")
    }
    assert found["blk.31.ffn_down.weight"] == found["blk.31.attn_v.weight"] == "Q6_K"
    assert "blk.31.nextn.enorm.weight" not in found


def test_experts_are_counted_by_layer() -> None:
    found = chosen("Q4_K_M", numbers(40, experts=256))
    six = [i for i in range(40) if i < 5 or i >= 35 or (i - 5) % 3 == 2]
    assert layers_with(found, "ffn_down_exps", "Q6_K") == layers_with(found, "ffn_down_shexp", "Q6_K") == six
    assert not [n for n in found if "ffn_gate_inp" in n]
    mxfp4 = chosen("MXFP4_MOE", numbers(40, experts=256))
    assert {f for n, f in mxfp4.items() if "_exps" in n} == {"MXFP4"}
    assert {f for n, f in mxfp4.items() if "_exps" not in n} == {"Q8_0"}


@pytest.mark.parametrize("name", MIXES)
def test_every_mix_keeps_what_is_never_quantised(name: str) -> None:
    hp = numbers(8, mtp=1)
    found = chosen(name, hp)
    kept = shapes(hp).keys() - found.keys()
    assert kept == {n for n, s in shapes(hp).items() if len(s) == 1 or "ssm_conv1d" in n}
    base = MIXES[name].base if name != "MXFP4_MOE" else "Q8_0"
    assert found["blk.0.ffn_up.weight"] == base
    assert FILE_TYPES[MIXES[name].file_type] == name


@pytest.mark.parametrize("mix", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q5_K_S", "Q6_K", "Q3_K_S", "Q8_0"])
def test_mixes_of_one_format(mix: str) -> None:
    found = chosen(mix, numbers(32))
    output = found.pop("output.weight")
    assert set(found.values()) == {MIXES[mix].base}
    assert output == ("Q8_0" if mix == "Q8_0" else "Q6_K")
    assert chosen(mix, numbers(32, tied=True))["token_embd.weight"] == output


def test_the_remaining_mixes() -> None:
    hp = numbers(32)
    two = chosen("Q2_K", hp)
    assert {two["blk.0.attn_qkv.weight"], two["blk.31.attn_v.weight"]} == {"Q4_K"}
    assert {two["blk.0.ffn_down.weight"], two["blk.31.attn_output.weight"]} == {"Q3_K"}
    assert chosen("Q2_K", numbers(32, heads=8))["blk.0.attn_qkv.weight"] == "Q3_K"
    large = chosen("Q3_K_L", hp)
    assert {large[f"blk.31.{n}.weight"] for n in ("attn_v", "ffn_down", "attn_output")} == {"Q5_K"}
    for mix in ("IQ4_NL", "IQ4_XS"):
        found = chosen(mix, hp)
        assert layers_with(found, "ffn_down", "Q5_K") == [0, 1, 2, 3]
        assert set(layers_with(found, "attn_qkv", "Q5_K") + layers_with(found, "attn_v.", "Q5_K")) == set(range(32))


def test_importance_weights_change_the_first_eighth() -> None:
    hp, options = numbers(32), MixOptions(imatrix=True)
    assert layers_with(chosen("Q4_0", hp, options), "ffn_down", "Q4_1") == [0, 1, 2, 3]
    assert layers_with(chosen("Q5_0", hp, options), "ffn_down", "Q5_1") == [0, 1, 2, 3]
    assert layers_with(chosen("IQ4_XS", hp, options), "ffn_down", "Q5_K") == []


def test_pure_and_flags() -> None:
    hp = numbers(8)
    assert set(chosen("Q4_K_M", hp, MixOptions(pure=True)).values()) == {"Q4_K"}
    found = chosen("Q4_K_M", hp, MixOptions(pure=True, output=Q8_0, token_embedding=Q5_K))
    assert found.pop("output.weight") == "Q8_0"
    assert found.pop("token_embd.weight") == "Q5_K"
    assert set(found.values()) == {"Q4_K"}
    tied = numbers(8, tied=True)
    assert chosen("Q4_K_M", tied, MixOptions(output=Q8_0))["token_embd.weight"] == "Q8_0"
    with pytest.raises(ConfigError, match="--output-tensor-type: the output is the token embedding"):
        chosen("Q4_K_M", tied, MixOptions(output=Q8_0, token_embedding=Q8_0))


def test_patterns_are_searched_and_the_first_wins() -> None:
    hp = numbers(8)
    known = ["Q8_0", "Q6_K", "F16"]
    types = [parse_tensor_type(t, known) for t in (r"blk\.[0-2]\.attn_qkv=q8_0", "attn_qkv=Q6_K", "ffn_up=f16")]
    found = chosen("Q4_K_M", hp, MixOptions(tensor_types=types))
    assert [found[f"blk.{i}.attn_qkv.weight"] for i in (0, 1, 2, 4, 5, 6)] == ["Q8_0"] * 3 + ["Q6_K"] * 3
    assert {f for n, f in found.items() if "ffn_up" in n} == {"F16"}
    # The others are as they were.
    plain = chosen("Q4_K_M", hp)
    assert {n: f for n, f in found.items() if "attn_qkv" not in n and "ffn_up" not in n} == {
        n: f for n, f in plain.items() if "attn_qkv" not in n and "ffn_up" not in n
    }


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["attn_w=Q6_K"], "the pattern 'attn_w' decides no tensor: it is in the name of none"),
        (["attn_norm=Q8_0"], "the pattern 'attn_norm' decides no tensor: it is in the name of none"),
        (["attn=Q6_K", "attn_v=Q8_0"], "the pattern 'attn_v' decides no tensor: .* put it first"),
    ],
)
def test_a_pattern_that_decides_nothing_is_an_error(patterns: list[str], message: str) -> None:
    types = [parse_tensor_type(p, BY_NAME) for p in patterns]
    with pytest.raises(ConfigError, match=message):
        chosen("Q4_K_M", numbers(8), MixOptions(tensor_types=types))


@pytest.mark.parametrize(
    ("form", "columns", "want"),
    [
        ("Q4_K", 320, "Q5_0"),
        ("Q5_K", 320, "Q5_1"),
        ("Q6_K", 320, "Q8_0"),
        ("Q3_K", 320, "Q4_0"),
        ("Q2_K", 320, "Q4_0"),
        ("IQ4_XS", 320, "IQ4_NL"),
        ("IQ3_S", 320, "IQ4_NL"),
        ("Q4_K", 4304, "F16"),
        ("Q8_0", 4304, "F16"),
        ("IQ4_NL", 40, "F16"),
    ],
)
def test_rows_that_blocks_do_not_divide(form: str, columns: int, want: str) -> None:
    found = fitting(BY_NAME[form], columns)
    assert found.format is BY_NAME[want]
    assert found.note == f"rows of {columns} are no multiple of {BY_NAME[form].block}: {want} in place of {form}"
    assert fitting(BY_NAME[form], 512) == Choice(BY_NAME[form])


def test_names_of_mixes_and_their_faults() -> None:
    assert find_mix("q4_k") is MIXES["Q4_K_M"]
    assert {find_mix(a).name for a in ALIASES} == {"Q3_K_M", "Q4_K_M", "Q5_K_M"}
    with pytest.raises(
        ConfigError, match=r"unknown type 'Q4_KM' \(did you mean Q4_K_M\?\); there are F32, .*MXFP4_MOE"
    ):
        find_mix("Q4_KM")
    with pytest.raises(ConfigError, match=r"unknown type 'what'; there are Q8_0, Q6_K$"):
        find_format("what", ["Q8_0", "Q6_K"])
    for text in ("attn_v", "=Q6_K", "attn_v="):
        with pytest.raises(ConfigError, match="PATTERN=TYPE is needed"):
            parse_tensor_type(text, BY_NAME)
    with pytest.raises(ConfigError, match=r"'attn_\(v' is not a regular expression"):
        parse_tensor_type("attn_(v=Q6_K", BY_NAME)
    with pytest.raises(ConfigError, match=r"--tensor-type attn_v=Q6K: unknown type 'Q6K' \(did you mean Q6_K\?\)"):
        parse_tensor_type("attn_v=Q6K", BY_NAME)


@pytest.mark.parametrize("name", MIXES)
def test_stated_bits_per_weight(name: str) -> None:
    hp = numbers(40, experts=256) if name == "MXFP4_MOE" else numbers(32, mtp=1)
    found = choose(MIXES[name], shapes(hp), hp, MixOptions())
    size = sum(math.prod(s[1:]) * (found[n].format or BY_NAME["F32"]).row_bytes(s[0]) for n, s in shapes(hp).items())
    weights = sum(math.prod(s) for s in shapes(hp).values())
    assert MIXES[name].bits == round(8 * size / weights, 2)

"""The sampler against a NumPy float64 reference, by hand calculation, and under hostile values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from qwen35rt import _native
from qwen35rt.engine.sampler import Sampler, SamplingParams, logprob_of, make_workspace
from qwen35rt.errors import GenerationFailed, RequestError

Row = npt.NDArray[np.float32]
N_VOCAB = 248_320
PADDING = range(N_VOCAB - 243, N_VOCAB)
GREEDY = SamplingParams(temperature=0.0)
PLAIN = SamplingParams(temperature=1.0, top_k=0, seed=1)
SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.95),
    SamplingParams(temperature=1.5, top_k=5_000, top_p=0.999),
    SamplingParams(temperature=0.3, top_k=100, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=-1, top_p=0.9),
    SamplingParams(temperature=2.0, top_k=0, top_p=0.5, min_p=0.02),
    SamplingParams(temperature=0.8, top_k=0, min_p=0.05),
    SamplingParams(temperature=0.7, top_k=0),
    SamplingParams(temperature=0.9, top_k=0, top_p=0.0),
    SamplingParams(temperature=0.9, top_k=0, min_p=1.0),
]


@pytest.fixture(scope="module")
def workspace() -> npt.NDArray[np.uint8]:
    return make_workspace(N_VOCAB)


def vector(number: int) -> Row:
    """Logits of several shapes: flat to steep, peaked, with many ties, with -Inf."""
    rng = np.random.default_rng([20, number])
    x = rng.normal(0, (0.5, 1, 2, 4)[number % 4], N_VOCAB)
    if number % 3 == 1:
        x[rng.integers(0, N_VOCAB, 200)] += np.linspace(0, 14, 200)
    if number % 5 == 2:
        x = np.round(x * 8) / 8
    if number % 7 == 3:
        x[rng.integers(0, N_VOCAB, 1_000)] = -np.inf
    return x.astype(np.float32)


def adjusted(logits: Row, p: SamplingParams, banned: range, generated: Mapping[int, int], window: set[int]) -> Row:
    """Bias, bans and penalties, one float32 rounding each, as section 14 of the server's description defines them."""
    x = logits.copy()
    for i, bias in p.logit_bias.items():
        x[i] = -np.inf if bias is False else x[i] + np.float32(bias)
    x[list(banned)] = -np.inf
    for i in window:
        x[i] = float(x[i]) / p.repetition_penalty if x[i] > 0 else float(x[i]) * p.repetition_penalty
    for i, count in generated.items():
        x[i] = float(x[i]) - count * p.frequency_penalty - p.presence_penalty
    return x


def compare(x: Row, p: SamplingParams, order: npt.NDArray[np.int64], sampler: Sampler, logits: Row) -> None:
    """Check kept set and probabilities; a token may differ only where its sum is within 2e-7 of top_p."""
    ids, probs = sampler.distribution(logits)
    sorted_x = x[order].astype(np.float64)
    n = int(np.isfinite(sorted_x).sum())
    if p.top_k > 0:
        n = min(n, p.top_k)
    if p.top_p < 1:
        weights = np.exp(sorted_x[:n] - sorted_x[0])
        sums = np.cumsum(weights) / weights.sum()
        at_most, at_least = (int(np.searchsorted(sums, p.top_p + e)) + 1 for e in (2e-7, -2e-7))
        exact = int(np.searchsorted(sums, p.top_p)) + 1
        n = len(ids) if at_least <= len(ids) <= at_most else exact
    if p.min_p > 0:
        n = min(n, int((sorted_x - sorted_x[0] >= math.log(p.min_p)).sum()))
    weights = np.exp((sorted_x[:n] - sorted_x[0]) / p.temperature)
    by_id = np.argsort(order[:n])
    mine = np.argsort(ids)
    np.testing.assert_array_equal(ids[mine], order[:n][by_id])
    np.testing.assert_allclose(probs[mine], (weights / weights.sum())[by_id], rtol=0, atol=1e-6)
    assert sampler.sample(logits, 3).id in set(ids.tolist())


def check_vector(number: int, workspace: npt.NDArray[np.uint8]) -> None:
    logits = vector(number)
    x = adjusted(logits, SamplingParams(), PADDING, {}, set())
    order = np.argsort(-x, kind="stable")
    for p in SETTINGS:
        compare(x, p, order, Sampler(p, N_VOCAB, PADDING, workspace=workspace), logits)
    rng = np.random.default_rng([21, number])
    bias = {int(i): float(b) for i, b in zip(order[5:9], rng.uniform(-9, 9, 4), strict=True)}
    p = SamplingParams(1.0, 50, 0.99, 0.01, 0.7, 0.3, 1.3, 8, 1, {**bias, int(order[0]): False})
    tokens = [int(t) for t in order[rng.integers(0, 60, 30)]]
    prompt = [int(t) for t in order[60:64]]
    sampler = Sampler(p, N_VOCAB, PADDING, prompt=prompt, workspace=workspace)
    for count, token in enumerate(tokens):
        if count in (2, 7):
            y = adjusted(logits, p, PADDING, Counter(tokens[:count]), set((prompt + tokens[:count])[-8:]))
            compare(y, p, np.argsort(-y, kind="stable"), sampler, logits)
        sampler.accept(token)
    y = adjusted(logits, p, PADDING, Counter(tokens), set(tokens[-8:]))
    compare(y, p, np.argsort(-y, kind="stable"), sampler, logits)


@pytest.mark.parametrize("number", range(12))
def test_c23_against_numpy(number: int, workspace: npt.NDArray[np.uint8]) -> None:
    """C23: same kept set and probabilities as NumPy for every sampler."""
    check_vector(number, workspace)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_c23_against_numpy_long(workspace: npt.NDArray[np.uint8]) -> None:
    for number in range(12, 1_000):
        check_vector(number, workspace)


def test_c23_greedy_takes_the_lowest_id_on_ties_and_never_padding() -> None:
    """C23: arg-max after bias and bans; 200 ids span several blocks and a partial one."""
    x = np.zeros(200, np.float32)
    x[[70, 130, 199]] = 5
    assert Sampler(GREEDY, 200).sample(x, 0).id == 70
    assert Sampler(GREEDY, 200, banned=[70]).sample(x, 0).id == 130
    assert Sampler(GREEDY, 200, banned=range(64, 199)).sample(x, 0).id == 199
    biased = replace(GREEDY, logit_bias={3: 5.5, 70: False})
    assert Sampler(biased, 200).sample(x, 0).id == 3
    assert Sampler(replace(GREEDY, temperature=9e-6), 200).sample(x, 0).id == 70
    x[:2] = [-0.0, 0.0]
    assert Sampler(GREEDY, 2).sample(x[:2], 0).id == 0


def test_c23_ties_in_top_k_and_top_p_go_by_id() -> None:
    """Equal logits: the lowest ids are kept, whichever way the set is found."""
    x = np.zeros(1_000, np.float32)
    x[[5, 900]] = -1
    ids, _ = Sampler(SamplingParams(top_k=7), 1_000).distribution(x)
    assert sorted(ids.tolist()) == [0, 1, 2, 3, 4, 6, 7]
    for p, n in ((0.1, 100), (0.6, 600)):  # the first by sorting the best, the second by the histogram
        ids, probs = Sampler(replace(PLAIN, top_p=p), 1_000).distribution(x)
        total = 998 + 2 * math.exp(-1)
        kept = math.ceil(p * total)
        assert sorted(ids.tolist()) == [i for i in range(n + 5) if i != 5][:kept]
        np.testing.assert_allclose(probs, 1 / kept, atol=1e-9)


@pytest.mark.parametrize(
    "p", [replace(PLAIN, top_p=0.0), replace(PLAIN, min_p=1.0), replace(PLAIN, top_p=0.0, top_k=3)]
)
def test_c23_one_token_always_stays(p: SamplingParams) -> None:
    x = np.array([0.5, 2.0, 1.0, -np.inf], np.float32)
    ids, probs = Sampler(p, 4).distribution(x)
    assert ids.tolist() == [1]
    assert probs.tolist() == [1.0]


def test_extreme_values_stay_finite() -> None:
    """Penalties at their limits on logits at theirs neither overflow nor produce NaN."""
    x = np.array([3e38, -3e38, 1e-30, 0, -np.inf], np.float32)
    for r in (5e-324, 1e-30, 10.0):
        p = replace(PLAIN, repetition_penalty=r, presence_penalty=-2.0, frequency_penalty=2.0, temperature=1e-5)
        sampler = Sampler(p, 5, prompt=[0, 1, 2, 3, 4])
        sampler.accept(1)
        ids, probs = sampler.distribution(x)
        assert 4 not in ids
        assert np.isfinite(probs).all()
        assert sampler.sample(x, 0).id in (0, 2)


# chi-square, with the Wilson-Hilferty form of its 0.999 quantile
def chi_square_ok(counts: npt.NDArray[np.float64], probs: npt.NDArray[np.float64]) -> bool:
    expected = probs * counts.sum()
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    statistic = ((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    df = int((expected > 0).sum()) - 1
    critical = df * (1 - 2 / (9 * df) + 3.0902 * math.sqrt(2 / (9 * df))) ** 3
    return bool(statistic < critical)


def test_chi_square_rejects_a_wrong_distribution() -> None:
    rng = np.random.default_rng(5)
    probs = np.full(20, 0.05)
    counts = np.bincount(rng.integers(0, 20, 100_000), minlength=20).astype(np.float64)
    assert chi_square_ok(counts, probs)
    counts[3] += 400
    assert not chi_square_ok(counts, probs)


@pytest.mark.parametrize("p", [replace(PLAIN, seed=11), SamplingParams(seed=12), SamplingParams(1.5, 0, 0.9, seed=13)])
def test_draws_follow_the_distribution(p: SamplingParams) -> None:
    """100,000 draws: chi-square p > 0.001."""
    x = np.random.default_rng(4).normal(0, 1.5, 300).astype(np.float32)
    sampler = Sampler(p, 300, banned=range(280, 300))
    drawn = np.bincount([sampler.sample(x, t).id for t in range(100_000)], minlength=300).astype(np.float64)
    ids, probs = sampler.distribution(x)
    expected = np.zeros(300)
    expected[ids] = probs
    assert drawn[expected == 0].sum() == 0
    assert chi_square_ok(drawn, expected)


def test_draws_over_the_whole_vocabulary(workspace: npt.NDArray[np.uint8]) -> None:
    x = vector(8)
    sampler = Sampler(replace(PLAIN, seed=3), N_VOCAB, PADDING, workspace=workspace)
    ids, probs = sampler.distribution(x)
    drawn = np.bincount([sampler.sample(x, t).id // 6_208 for t in range(1_500)], minlength=40)
    expected = np.zeros(40)
    np.add.at(expected, ids // 6_208, probs)
    assert chi_square_ok(drawn.astype(np.float64), expected)


def test_c27_random_numbers() -> None:
    """C27: the published first block of Philox 4x32-10, and an even spread along each of the three arguments."""
    assert _native.sample_uniform(0, 0, 0) == (0xE169C58D6627E8D5 >> 11) * 2.0**-53
    along: list[Callable[[int], float]] = [
        lambda i: _native.sample_uniform(7, 0, i),
        lambda i: _native.sample_uniform(i, 0, 5),
        lambda i: _native.sample_uniform(7, i, 5),
    ]
    for f in along:
        u = np.array([f(i) for i in range(20_000)])
        assert (u >= 0).all()
        assert (u < 1).all()
        assert len(set(u.tolist())) == 20_000
        assert chi_square_ok(np.histogram(u, 100, (0, 1))[0].astype(np.float64), np.full(100, 0.01))
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03


def run(sampler: Sampler, rows: list[Row]) -> list[int]:
    ids = []
    for position, row in enumerate(rows):
        ids.append(sampler.sample(row, position).id)
        sampler.accept(ids[-1])
    return ids


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    rng = np.random.default_rng(9)
    return [rng.normal(0, 1, 500).astype(np.float32) for _ in range(40)]


def test_c25_same_seed_same_ids_alone_and_interleaved(rows: list[Row]) -> None:
    p = SamplingParams(1.0, 0, 0.95, presence_penalty=0.5, repetition_penalty=1.1, seed=2**63 - 1)
    alone = run(Sampler(p, 500), rows)
    shared = make_workspace(500)
    one, other = Sampler(p, 500, workspace=shared), Sampler(replace(p, seed=5), 500, workspace=shared)
    mixed = []
    for position, row in enumerate(rows):
        mixed.append(one.sample(row, position).id)
        other.accept(other.sample(rows[-position], position).id)
        one.accept(mixed[-1])
    assert mixed == alone


def test_c26_a_fresh_seed_is_reported_and_repeats(rows: list[Row]) -> None:
    first, second = Sampler(replace(PLAIN, seed=None), 500), Sampler(replace(PLAIN, seed=-1), 500)
    assert 0 <= first.seed < 2**53
    assert first.seed != second.seed
    ids = run(first, rows)
    assert run(second, rows) != ids
    assert run(Sampler(replace(PLAIN, seed=first.seed), 500), rows) == ids


def test_c27_a_draw_depends_on_seed_choice_and_position_only(rows: list[Row]) -> None:
    ids = run(Sampler(PLAIN, 500), rows)
    backwards = [Sampler(PLAIN, 500).sample(rows[t], t).id for t in reversed(range(40))]
    assert backwards[::-1] == ids
    assert run(Sampler(PLAIN, 500, choice=1), rows) != ids
    assert run(Sampler(replace(PLAIN, seed=2), 500), rows) != ids
    assert len({Sampler(PLAIN, 500).sample(rows[0], t).id for t in range(40)}) > 10


def test_b80_presence_frequency_repetition_by_hand() -> None:
    """B80: presence and frequency act on generated tokens only, repetition on the prompt too."""
    logits = [np.array([2, 1.5, 0], np.float32)] * 5
    assert run(Sampler(replace(GREEDY, presence_penalty=1.0), 3), logits) == [0, 1, 0, 0, 0]
    # 2 | 1.6 | 1.2 < 1.5 | 1.2 > 1.1 | 0.8 < 1.1
    assert run(Sampler(replace(GREEDY, frequency_penalty=0.4), 3), logits) == [0, 0, 1, 0, 1]
    prompt = [0] * 9
    assert run(Sampler(replace(GREEDY, presence_penalty=1.0), 3, prompt=prompt), logits)[0] == 0
    assert run(Sampler(replace(GREEDY, frequency_penalty=2.0), 3, prompt=prompt), logits)[0] == 0
    assert run(Sampler(replace(GREEDY, repetition_penalty=2.0), 3, prompt=prompt), logits)[0] == 1
    # once 0 leaves the window of two it is the best again: window [1], [0,1], [1,1] ...
    narrow = replace(GREEDY, repetition_penalty=2.0, repeat_last_n=1)
    assert run(Sampler(narrow, 3, prompt=prompt), logits) == [1, 0, 1, 0, 1]
    assert run(Sampler(replace(narrow, repeat_last_n=0), 3, prompt=prompt), logits)[0] == 0
    assert run(Sampler(replace(narrow, repeat_last_n=-1), 3, prompt=[0] + [1] * 99), logits)[0] == 0
    assert run(Sampler(replace(narrow, repeat_last_n=-1), 3, prompt=[0] + [2] * 99), logits)[0] == 1
    negative = np.array([-1, -1.5, -3], np.float32)
    assert Sampler(replace(GREEDY, repetition_penalty=2.0), 3, prompt=prompt).sample(negative, 0).id == 1


def test_b80_reported_log_probabilities_stay_raw() -> None:
    x = np.array([2, 1.5, 0], np.float32)
    p = replace(GREEDY, presence_penalty=2.0, logit_bias={2: 100.0}, logprobs=3)
    sampler = Sampler(p, 3)
    sampler.accept(0)
    got = sampler.sample(x, 1)
    raw = x - math.log(np.exp(x.astype(np.float64)).sum())
    assert got.id == 2
    assert got.logprob == pytest.approx(raw[2], abs=1e-6)
    assert got.top is not None
    assert [i for i, _ in got.top] == [0, 1, 2]
    assert [v for _, v in got.top] == pytest.approx(raw.tolist(), abs=1e-6)
    assert got.top[2][1] == got.logprob  # C57: the identical number


@pytest.mark.parametrize("n", [0, 1, 5, 20])
def test_b86_log_probabilities(n: int, workspace: npt.NDArray[np.uint8]) -> None:
    """B86, C55: log-softmax of the raw logits over all ids, padding included, equal at every temperature."""
    for number in range(4):
        x = vector(number)
        x[N_VOCAB - 1] = x.max() + 1  # padding is never drawn but is part of the sum
        wide = x.astype(np.float64)
        raw = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
        best = np.argsort(-x, kind="stable")[:n]
        tops = set()
        for temperature in (0.0, 0.7, 2.0):
            p = SamplingParams(temperature, presence_penalty=1.0, seed=4, logprobs=n)
            got = Sampler(p, N_VOCAB, PADDING, workspace=workspace).sample(x, 0)
            assert got.logprob == pytest.approx(raw[got.id], abs=1e-4)
            assert got.top is not None
            assert [i for i, _ in got.top] == best.tolist()
            assert [v for _, v in got.top] == pytest.approx(raw[best].tolist(), abs=1e-4)
            assert sum(math.exp(v) for _, v in got.top) <= 1 + 1e-6
            tops.add(got.top)
        assert len(tops) == 1


def test_log_probabilities_only_where_asked_for_and_with_minus_infinity() -> None:
    x = np.array([1, -np.inf, 1], np.float32)
    assert Sampler(GREEDY, 3).sample(x, 0)[1:] == (None, None)
    got = Sampler(replace(GREEDY, logprobs=20), 3).sample(x, 0)
    assert got.top is not None
    assert [i for i, _ in got.top] == [0, 2, 1]
    assert got.top[2][1] == -math.inf
    known, best = logprob_of(x, 2, 20)  # of a token of the prompt
    assert known == pytest.approx(-math.log(2))
    assert best == ((0, known), (2, known), (1, -math.inf))


def test_logits_are_left_as_they_are(rows: list[Row]) -> None:
    x = rows[0].copy()
    x.flags.writeable = False
    sampler = Sampler(SamplingParams(1.0, 0, 0.9, presence_penalty=1.0, logit_bias={1: 3.0}, seed=1), 500, [2])
    run(sampler, [x] * 5)
    np.testing.assert_array_equal(x, rows[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.nan])
@pytest.mark.parametrize("p", [GREEDY, PLAIN, SamplingParams(), replace(GREEDY, logprobs=3)])
def test_b29_logits_that_are_not_finite_end_the_turn(bad: float, p: SamplingParams) -> None:
    """B29: wherever the value stands, banned ids included."""
    for place in (0, 63, 64, 199):
        x = np.zeros(200, np.float32)
        x[place] = bad
        with pytest.raises(GenerationFailed, match="not finite"):
            Sampler(p, 200, banned=[199]).sample(x, 0)
    with pytest.raises(GenerationFailed, match="not finite"):
        Sampler(p, 200).sample(np.full(200, -np.inf, np.float32), 0)
    assert Sampler(p, 200).sample(np.zeros(200, np.float32), 0).id < 200


def test_no_token_left() -> None:
    x = np.full(5, -np.inf, np.float32)
    x[2] = 1
    with pytest.raises(GenerationFailed, match="no token"):
        Sampler(PLAIN, 5, banned=[2]).sample(x, 0)
    with pytest.raises(RequestError) as refused:
        Sampler(replace(PLAIN, logit_bias={0: False, 1: False}), 3, banned=[2])
    assert refused.value.param == "logit_bias"


def test_c30_end_tokens_are_banned_not_skipped() -> None:
    """C30: EOG before min_tokens and with ignore_eos; stop_token_ids before min_tokens."""
    x = [np.array([1, 2, 3, 4], np.float32)] * 4
    assert run(Sampler(GREEDY, 4, eog=[3]), x) == [3, 3, 3, 3]
    assert run(Sampler(replace(GREEDY, ignore_eos=True), 4, eog=[3]), x) == [2, 2, 2, 2]
    assert run(Sampler(replace(GREEDY, min_tokens=2, stop_token_ids=[2]), 4, eog=[3]), x) == [1, 1, 3, 3]
    both = replace(GREEDY, min_tokens=1, ignore_eos=True, stop_token_ids=[2])
    assert run(Sampler(both, 4, eog=[3]), x) == [1, 2, 2, 2]

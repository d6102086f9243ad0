"""Incremental text: UTF-8 over token borders, stop strings, work per token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35rt.tokenizer import Detokenizer, Tokenizer


class Script:
    """Token i has the i-th of the given byte strings; ``hidden`` ones count as control tokens."""

    def __init__(self, parts: Sequence[bytes | str], hidden: Sequence[int] = ()) -> None:
        self.parts = [p.encode() if isinstance(p, str) else p for p in parts]
        self._hidden = set(hidden)

    def token_bytes(self, token: int) -> bytes:
        return self.parts[token]

    def hidden(self, token: int) -> bool:
        return token in self._hidden


def run(
    parts: Sequence[bytes | str],
    stops: Sequence[str] = (),
    hidden: Sequence[int] = (),
    skip_special: bool = True,
    include_stop: bool = False,
) -> tuple[list[str], str | None]:
    """Text after each token and at the end, and the stop that ended it."""
    detok = Detokenizer(Script(parts, hidden), stops, skip_special, include_stop)
    out = [detok.push(i) for i in range(len(parts))]
    out.append(detok.finish())
    assert detok.stopped == (detok.stop_reason is not None)
    return out, detok.stop_reason


def test_b53_split_characters_wait_and_broken_ones_show_once() -> None:
    parts = [b"\xf0", b"\x9f", b"\x98", b"\x80", b"\xe3", b"\x81", b"x", b"text"]
    out, _ = run(parts)
    assert out == ["", "", "", "😀", "", "", "\ufffdx", "text", ""]


@pytest.mark.parametrize(
    ("parts", "end"), [([b"a", b"\xe3"], "\ufffd"), ([b"a", b"\xe3", b"\x81"], "\ufffd"), ([b"a"], "")]
)
def test_b54_an_open_character_ends_as_one_replacement(parts: list[bytes], end: str) -> None:
    """C36."""
    out, _ = run(parts)
    assert out[-1] == end
    assert "".join(out) == b"".join(parts).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("stops", "text", "reason", "deltas"),
    [
        (["CDE"], "AB", "CDE", ["A", "B", "", "", ""]),
        (["CDX"], "ABCDEFG", None, ["A", "B", "CDEF", "G", ""]),
        (["EF", "DE"], "ABC", "DE", ["A", "BC", "", "", ""]),
        (["G", "DEFG"], "ABC", "DEFG", ["A", "BC", "", "", ""]),
        (["ABCDEFGH"], "ABCDEFG", None, ["", "", "", "", "ABCDEFG"]),
        (["A"], "", "A", ["", "", "", "", ""]),
    ],
)
def test_b77_stops_over_token_borders(stops: list[str], text: str, reason: str | None, deltas: list[str]) -> None:
    """C31, C35."""
    out, got = run(["A", "BC", "DEF", "G"], stops)
    assert ("".join(out), got) == (text, reason)
    assert out == deltas


def test_c31_the_smallest_start_wins_whatever_the_order_of_stops() -> None:
    for stops in (["cd", "bcd"], ["bcd", "cd"]):
        out, reason = run(["a", "bcde"], stops)
        assert ("".join(out), reason) == ("a", "bcd")


def test_c31_a_stop_that_ends_earlier_ends_the_turn_earlier() -> None:
    """With one character a token 'c' is complete before 'bcd' is."""
    out, reason = run(list("abcd"), ["bcd", "c"])
    assert ("".join(out), reason) == ("ab", "c")


@pytest.mark.parametrize(("include", "text"), [(False, "A"), (True, "ABC")])
def test_c33_include_stop_cuts_behind_it(include: bool, text: str) -> None:
    out, reason = run(["A", "BCD"], ["BC", "BCD"], include_stop=include)
    assert ("".join(out), reason) == (text, "BC")


def test_c35_only_the_longest_tail_that_can_become_a_stop_is_held() -> None:
    out, _ = run(["aab", "x", "aa", "c"], ["aabb", "abc"])
    assert out == ["", "aabx", "", "aac", ""]
    assert run(["aa", "b", "c"], ["aabb", "abc"])[0] == ["", "", "a", ""]


def test_c35_nothing_is_held_without_stops() -> None:
    assert run(["ab", "c"])[0] == ["ab", "c", ""]


def test_c37_control_tokens_are_left_out_or_spelled() -> None:
    parts = ["a", "<|im_start|>", "b"]
    assert "".join(run(parts, hidden=[1])[0]) == "ab"
    assert "".join(run(parts, hidden=[1], skip_special=False)[0]) == "a<|im_start|>b"


def test_c31_a_stop_may_be_found_in_the_last_open_character() -> None:
    out, reason = run(["ab", b"\xe3"], ["b\ufffd"])
    assert ("".join(out), reason) == ("a", "b\ufffd")


def test_nothing_comes_after_a_stop() -> None:
    detok = Detokenizer(Script(["stop", "more"]), ["stop"])
    assert [detok.push(0), detok.push(1), detok.finish()] == ["", "", ""]


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(Script([]), [""])


def whole(tokens: list[bytes], stops: list[str], include: bool) -> tuple[str, str | None]:
    """C31 word for word: after each token search the whole text so far."""
    for n in range(1, len(tokens) + 1):
        data = b"".join(tokens[:n])
        open_end = len(data)
        for back in range(1, 4):  # an open character is no text yet
            tail = data[-back:]
            try:
                tail.decode()
            except UnicodeDecodeError as e:
                if e.reason == "unexpected end of data" and e.start == 0:
                    open_end = len(data) - back
        text = (data if n == len(tokens) else data[:open_end]).decode("utf-8", "replace")
        for candidate in [data[:open_end].decode("utf-8", "replace"), text]:
            found = sorted((candidate.find(s), len(s), s) for s in stops if s in candidate)
            if found:
                at, length, stop = found[0]
                return candidate[: at + length * include], stop
    return b"".join(tokens).decode("utf-8", "replace"), None


BYTES = st.one_of(
    st.sampled_from([b"a", b"b", b"ab", b"ba", b"", "é".encode(), "😀".encode(), "日本".encode()]),
    st.sampled_from([b"\xf0", b"\x9f", b"\x98", b"\x80", b"\xe3", b"\x81", b"\xff", b"\xc0", b"\xed", b"\xa0"]),
    st.binary(max_size=4),
)
STOPS = st.lists(st.text("abé😀日\ufffd", min_size=1, max_size=4), max_size=4)


@settings(max_examples=600, deadline=None)
@given(st.lists(BYTES, max_size=14), STOPS, st.booleans())
def test_c36_streamed_text_is_the_text_decoded_whole(tokens: list[bytes], stops: list[str], include: bool) -> None:
    """C3, C31, C36: for every cut of every byte string, stops or none."""
    out, reason = run(tokens, stops, include_stop=include)
    assert ("".join(out), reason) == whole(tokens, stops, include)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=24), st.data())
def test_c36_no_cut_of_the_bytes_changes_the_text(data: bytes, draw: st.DataObject) -> None:
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=6)))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert "".join(run(parts)[0]) == data.decode("utf-8", "replace")


def test_c36_streamed_equals_decode_of_the_tokenizer(small: Tokenizer) -> None:
    ids = small.encode("the 😀 <|im_end|> the", special=True)
    detok = Detokenizer(small)
    assert "".join([*map(detok.push, ids), detok.finish()]) == small.decode(ids)


def test_c38_work_per_token_does_not_grow_with_the_text() -> None:
    """What is kept between tokens, which is all that a token's work can look at, has the same bound at every length."""
    stops = [f"never {i} this stop" for i in range(8)]
    longest, piece = max(map(len, stops)), "never 3 "
    detok = Detokenizer(Script([piece]), stops)
    for _ in range(4_000):
        detok.push(0)
        kept = [v for v in vars(detok).values() if isinstance(v, str | bytes | bytearray | list)]
        assert kept
        assert sum(map(len, kept)) <= 3 * (longest + len(piece))

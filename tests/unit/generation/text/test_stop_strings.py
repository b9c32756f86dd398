"""Stop strings, for any split of the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.generation.text.output_processor import Matched, StopMatcher

stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)
texts = st.text("abc", max_size=20)


def read(pieces: list[str], stops: list[str]) -> Matched:
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        matched = matcher.push(piece)
        text += matched.text
        if matched.stop is not None:
            return Matched(text, matched.stop)
    return Matched(text + matcher.flush())


def test_text_is_not_held_back_without_stop_strings() -> None:
    assert StopMatcher([]).push("abc") == Matched("abc")


def test_a_prefix_of_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the EN") == Matched("the ")
    assert matcher.push("GLISH") == Matched("ENGLISH")


def test_a_stop_string_that_spans_three_pieces_is_cut_from_the_text() -> None:
    assert read(["one E", "N", "D two"], ["END"]) == Matched("one ", "END")


def test_text_held_back_is_returned_at_the_end() -> None:
    matcher = StopMatcher(["END"])
    matcher.push("E")
    assert matcher.flush() == "E"
    assert matcher.flush() == ""


def test_the_stop_string_complete_first_wins() -> None:
    assert read(["abcd"], ["abcd", "bc"]) == Matched("a", "bc")


def test_of_two_stop_strings_complete_at_once_the_longer_wins() -> None:
    assert read(["xabc"], ["bc", "abc"]) == Matched("x", "abc")


def test_a_stop_string_may_begin_within_a_prefix_that_did_not_match() -> None:
    assert read(["aa", "b"], ["ab"]) == Matched("a", "ab")


def test_a_stop_string_that_is_complete_too_early_is_text() -> None:
    matcher = StopMatcher(["END", "N"])
    assert matcher.push("an END", may_end=False) == Matched("an END")
    assert matcher.push("ING") == Matched("I", "N")


def test_a_stop_string_may_begin_too_early_and_be_complete_later() -> None:
    matcher = StopMatcher(["END", "X"])
    assert matcher.push("XEN", may_end=False) == Matched("X")
    assert matcher.push("D") == Matched("", "END")


def test_a_stop_string_within_the_beginning_of_another_is_not_found_later() -> None:
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("abc", may_end=False) == Matched("")
    assert matcher.push("x") == Matched("abcx")


@given(texts, stops, st.data())
def test_the_result_does_not_depend_on_how_the_text_is_split(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces, stops) == read(list(text), stops)


@given(texts, stops)
def test_the_text_lacks_only_what_follows_the_first_stop_string(text: str, stops: list[str]) -> None:
    matched = read([text], stops)
    assert not any(stop in matched.text for stop in stops)
    assert text.startswith(matched.text + (matched.stop or ""))
    assert matched.stop is not None or matched.text == text

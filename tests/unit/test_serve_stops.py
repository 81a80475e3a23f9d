from hypothesis import example, given
from hypothesis import strategies as st

from stratakv.serve.stops import StopMatcher


def streamed(pieces, stops):
    matcher = StopMatcher(stops)
    shown = [matcher.feed(piece) for piece in pieces]
    matched = matcher.matched
    return "".join(shown) + ("" if matched else matcher.flush()), matched


def whole(text, stops):
    """The first stop string that is complete cuts; of those that end together, the longest."""
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(ends)[1]], True) if ends else (text, False)


small = st.text("ab#", max_size=8)


@given(st.lists(small, max_size=8), st.lists(st.text("ab#", min_size=1, max_size=5), max_size=4))
@example(["ab", "a", "ba"], ["aba"])
@example(["a", "b", "#"], ["ab#", "b"])
@example(["aab", "aab", "#"], ["aabaab#"])
def test_the_split_into_pieces_makes_no_difference(pieces, stops):
    assert streamed(pieces, stops) == whole("".join(pieces), stops)


def test_text_that_cannot_begin_a_stop_string_is_not_held_back():
    matcher = StopMatcher(["###END###"])
    assert matcher.feed("hello #x") == "hello #x"
    assert matcher.feed("hello ##") == "hello "
    assert matcher.feed("a") == "##a"


def test_nothing_comes_after_a_match():
    matcher = StopMatcher(["END"])
    assert matcher.feed("one EN") == "one "
    assert matcher.feed("D two") == ""
    assert matcher.matched
    assert matcher.feed("three") == ""
    assert matcher.flush() == ""

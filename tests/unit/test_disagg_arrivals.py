"""What prefill says of a prompt is held to what was asked, and to what the model has."""

import pytest

from stratakv.cache.records import TierTokens
from stratakv.disagg.arrivals import ArrivalBounds
from stratakv.disagg.messages import Arrival, Attempt
from stratakv.engine.request import TokenLogprob
from stratakv.engine.roles import FirstToken

BOUNDS = ArrivalBounds(tokens=30, logprobs=2, vocab_size=100)


def arrival(token=7, top=((7, -0.1), (99, -2.0)), cached=(10, 12, 8)):
    logprob = None if top is None else TokenLogprob(chosen=-0.1, top=top)
    return Arrival(Attempt("r", 1), FirstToken(token, logprob), TierTokens(*cached))


@pytest.mark.parametrize(
    "right", [{}, {"token": 99}, {"top": ()}, {"top": None}, {"cached": (0, 0, 30)}], ids=str
)
def test_what_can_be_is_believed(right):
    assert not BOUNDS.refusal(arrival(**right))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"cached": (10, 12, 9)}, "of a prompt of 30 tokens"),
        ({"cached": (31, -1, 0)}, "of a prompt of 30 tokens"),
        ({"token": 100}, "token 100, and the model has 100"),
        ({"token": -1}, "token -1"),
        ({"top": ((7, -0.1), (100, -2.0))}, "token 100"),
        ({"top": ((7, -0.1), (8, -2.0), (9, -3.0))}, "3 likeliest tokens, and 2 were asked for"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_its_figures(wrong, reason):
    assert reason in BOUNDS.refusal(arrival(**wrong))


def test_nobody_has_asked_for_what_is_likely_too():
    asked = ArrivalBounds(tokens=30, logprobs=None, vocab_size=100)
    assert "1 likeliest" in asked.refusal(arrival(top=((7, -0.1),)))
    assert not asked.refusal(arrival(top=None))

"""Messages between roles come back as they were sent, and what no role would send is refused."""

import json

import numpy as np
import pytest

from stratakv.cache.footprint import TransferPages
from stratakv.cache.records import CacheUse, TierTokens
from stratakv.core.errors import TransportError
from stratakv.disagg.messages import (
    Abort,
    Arrival,
    Attempt,
    Ended,
    PartWritten,
    Reserve,
    decode,
    encode,
)
from stratakv.disagg.page_places import pages_of
from stratakv.disagg.ranges import Regions, located
from stratakv.disagg.recompute import Recompute
from stratakv.disagg.transport import Writes
from stratakv.engine.request import SamplingParams, TokenLogprob
from stratakv.engine.roles import FirstToken

OF = Attempt("r", 3)


@pytest.mark.parametrize(
    "message",
    [
        PartWritten(OF),
        Arrival(OF, FirstToken(7), TierTokens(1, 2, 3)),
        Arrival(
            OF,
            FirstToken(7, TokenLogprob(chosen=-0.5, top=((7, -0.5), (8, -2.0)))),
            TierTokens(0, 0, 0),
        ),
        Abort(OF, reserved=True, reason="it left"),
        Ended(OF, "no"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_comes_back_as_it_was_sent(message):
    assert decode(encode(message)) == message


ARRIVED = json.loads(encode(Arrival(OF, FirstToken(7), TierTokens(1, 2, 3))))


@pytest.mark.parametrize(
    "wrong",
    [
        {"token": -1},
        {"token": 2**31},
        {"token": 10**30},
        {"cached": [-5, 0, 0]},
        {"cached": [0, 0, 10**30]},
        {"cached": [0, 0]},
        {"logprob": [-1.0, [[10**30, -1.0]]]},
        {"logprob": [-1.0, [[-5, -1.0]]]},
        {"logprob": [float("nan"), []]},
        {"logprob": [float("inf"), []]},
    ],
)
def test_an_arrival_with_impossible_numbers_is_none(wrong):
    with pytest.raises(TransportError, match="cannot be read"):
        decode(json.dumps(ARRIVED | wrong).encode())


def test_what_cannot_be_drawn_has_a_logarithm_too():
    logprob = TokenLogprob(chosen=-0.0, top=((7, -0.0), (8, float("-inf"))))
    message = Arrival(OF, FirstToken(7, logprob), TierTokens(0, 0, 0))
    assert decode(encode(message)) == message


def test_pages_come_back_as_they_were_named():
    pages = TransferPages(9, (pages_of(0, 1, [4, 2]), pages_of(1, -1, [])))
    back = decode(encode(Reserve(OF, "ab", pages)))
    assert isinstance(back, Reserve)
    assert (back.attempt, back.prompt, back.pages.tokens) == (OF, "ab", 9)
    for here, there in zip(pages.groups, back.pages.groups, strict=True):
        assert (here.group, here.first) == (there.group, there.first)
        np.testing.assert_array_equal(here.pages, there.pages)


AGAIN = Recompute(
    tokens=np.array([3, 70000, 0], np.int32),
    sampling=SamplingParams(
        max_tokens=1,
        temperature=0.7,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=1 << 63,
        logprobs=2,
        repetition_penalty=1.2,
        logit_bias=((3, 0.5), (70000, -2.0)),
    ),
    salt="alice",
    adapter="a",
    priority=4,
    use=CacheUse.READ,
)


def test_what_is_to_be_computed_again_comes_back_as_it_was_sent():
    back = decode(encode(Reserve(OF, "ab", TransferPages(3, ()), AGAIN)))
    assert isinstance(back, Reserve)
    assert back.again is not None
    np.testing.assert_array_equal(back.again.tokens, AGAIN.tokens)
    assert back.again.fields() == AGAIN.fields()
    asked = back.again.prompt("r+2")
    assert (asked.sampling, asked.salt, asked.adapter) == (AGAIN.sampling, "alice", "a")
    assert (asked.session.name, asked.priority, asked.use) == ("r+2", 4, CacheUse.READ)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": "/////w=="}, {"tokens": "!"}, {"tokens": 7}, {"tokens": "AAA="}, {"use": 9},
        {"temperature": "x"}, {"seed": None}, {"logprobs": []}, {"top_k": 1e400},
        {"logit_bias": [3]}, {"repetition_penalty": None},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_to_be_computed_again_is_read_with_care(wrong):
    fields = json.loads(encode(Reserve(OF, "ab", TransferPages(3, ()), AGAIN)))
    fields["again"] |= wrong
    with pytest.raises(TransportError, match="cannot be read"):
        decode(json.dumps(fields).encode())


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_prompt_without_tokens_is_none(tokens):
    fields = json.loads(encode(Reserve(OF, "ab", TransferPages(9, ()))))
    with pytest.raises(TransportError, match=f"a prompt of {tokens} tokens"):
        decode(json.dumps(fields | {"tokens": tokens}).encode())


@pytest.mark.parametrize(("region", "offset", "size"), [(1, 0, 4), (0, 60, 5), (0, 65, 1)])
def test_a_place_beyond_the_peer_s_memory_is_the_peer_s_fault(region, offset, size):
    here, there = (Regions.of([(base, 64)]) for base in (1000, 2000))
    one = [np.array([n], np.int64) for n in (0, 0, region, offset, size)]
    with pytest.raises(TransportError, match="leaves the peer's region"):
        located(Writes(*one), here, there)

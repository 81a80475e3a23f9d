"""Requests that are retracted where they decode: what the host has saved comes back, and what it
could not save goes back to prefill, over a transport, with all that was generated. Either way they
say what one engine says."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from stratakv.core.errors import RequestError
from stratakv.core.ids import RequestId
from stratakv.engine import loop
from stratakv.engine.grammars import Grammar
from stratakv.engine.request import Failure, FinishReason, Phase, Request
from stratakv.spec.retention import KeepBoundary, KeepLive, KeepWindow
from stratakv.testing.hand_off import HandOffSide
from stratakv.tiers import progress
from tests.engines import (
    RecordingRunner,
    ended,
    evict_device,
    expected_tokens,
    greedy,
    small_engine,
    tokens_of,
)
from tests.fixtures.transports import open_loopback
from tests.hit_cases import config_for, engine_model, prompt
from tests.pairs import PAGE, PROMPT, every_rule, right
from tests.transport_pairs import (
    Link,
    P,
    models_over,
    mooncake,
    settle,
    tcp,
    tokens_over,
    untidy,
    until,
)

PREFILL, DECODE = HandOffSide
HARD = KeepWindow(10), KeepBoundary(), KeepLive()
USUAL = {
    "loopback": (open_loopback, ("qwen3_next", "deepseek_v3", "deepseek_v32")),
    "nixl": (tcp, ("llama", "gemma3", "deepseek_v4")),
    "mooncake": (mooncake, ("gpt_oss",)),
}
"""Over each transport, who is tried in ``make test``; all others are long."""
CASES = [
    pytest.param(
        family, opened, id=f"{name}-{family}", marks=() if family in usual else pytest.mark.long
    )
    for name, (opened, usual) in USUAL.items()
    for _, families in USUAL.values()
    for family in families
]


@pytest.fixture(autouse=True)
def short_naps(monkeypatch):
    monkeypatch.setattr(progress, "POLL_S", 0.0005)


def unsaved(pair):
    return pair.decode.cache.tiers.pools.counters.retracted_unsaved


def retract_all(pair, names, tokens):
    """Each when it has so many; a name is taken off the device once."""
    left = set(names)
    while left:
        for name in [name for name in left if len(pair.outputs(name)) >= tokens]:
            pair.decode.engine.retract(RequestId(name))
            left.remove(name)
        pair.step()


@pytest.mark.parametrize("host", [False, True], ids=["goes back", "saved"])
@pytest.mark.parametrize(("family", "opened"), CASES)
def test_who_is_retracted_while_it_decodes_goes_on_exactly(family, opened, host):
    """Twice, so that the second time it brings what it has generated since."""
    with models_over(Link(opened, opened), family, host=host) as pair:
        asked = {f"{n}": prompt(PAGE, n, n) for n in (5, 48, 101)}
        for name, tokens in asked.items():
            pair.submit(greedy(name, tokens, 14))
        for tokens in (4, 8):
            retract_all(pair, asked, tokens)
        pair.drain()
        for name, tokens in asked.items():
            assert tokens_of(pair.outputs(name)) == right(family, tokens, 14)
        assert pair.decode.cache.tiers.pools.counters.retracted == 6
        assert unsaved(pair) == (0 if host else 6)
        succeeded = pair.link.roles[PREFILL].stats().succeeded
        assert succeeded == (3 if host else 9)
        settle(pair)


class InTurns:
    """Grammars of one form: the answer's token n is n modulo three."""

    def __init__(self):
        self._lengths = {}

    def refusal(self, grammar):
        return None

    def begin(self, row, grammar, output):
        self._lengths[row] = len(output)

    def append(self, rows, tokens):
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            assert token % 3 == self._lengths[row] % 3, "a token that may not come"
            self._lengths[row] += 1

    def masks(self, rows):
        turns = np.array([self._lengths[row] % 3 for row in rows.tolist()])
        may = np.arange(96) % 3 == turns[:, None]
        return np.packbits(may, axis=1, bitorder="little").view(np.int32)


DRAWN = {"temperature": 0.8, "top_k": 20, "min_p": 0.01}


@pytest.mark.parametrize(
    ("chosen", "goes_back"),
    [
        (DRAWN, True),
        (DRAWN | {"repetition_penalty": 1.4, "logit_bias": ((3, 1.5), (7, -2.0))}, True),
        ({"min_tokens": 3, "stop_tokens": (1,)}, True),
        # To prefill all of its tokens would be a prompt.
        (DRAWN | {"frequency_penalty": 0.8}, False),
        ({"presence_penalty": 1.5}, False),
        ({"min_tokens": 9, "stop_tokens": tuple(range(0, 128, 2))}, False),
        (DRAWN | {"grammar": Grammar("in turns")}, False),
    ],
    ids=[
        "drawn",
        "changed logits",
        "enough tokens",
        "counts",
        "presence",
        "too few tokens",
        "a grammar",
    ],
)
def test_however_tokens_are_chosen_the_answer_goes_on_as_it_would_have(chosen, goes_back):
    """Logprobs and all: prefill draws by seed and position, as one engine does."""
    sampling = replace(greedy("r", [1], 12).sampling, logprobs=2, **chosen)
    asked = [
        replace(greedy(f"{n}", prompt(PAGE, n, 40 + n), 1), sampling=replace(sampling, seed=n))
        for n in range(3)
    ]
    settings, pages = config_for(PAGE), ((64,), (64,))
    with small_engine(engine_model("llama"), settings, *pages, grammars=InTurns()) as parts:
        alone = {one.id: [] for one in asked}
        for one in asked:
            parts.engine.submit(one)
        while parts.engine.has_work():
            for output in parts.engine.step():
                alone[output.request].append(output)
    with models_over(Link(), "llama", host=False, grammars=InTurns) as pair:
        for one in asked:
            pair.submit(one)
        retract_all(pair, alone, 5)
        pair.drain()
        assert unsaved(pair) == 3
        assert pair.link.roles[PREFILL].stats().succeeded == (6 if goes_back else 3)
        for name, outputs in alone.items():
            found = pair.outputs(name)
            assert tokens_of(found) == tokens_of(outputs)
            for mine, theirs in zip(found, outputs, strict=True):
                assert mine.logprob.chosen == pytest.approx(theirs.logprob.chosen, abs=1e-4)
        settle(pair)


@every_rule
@pytest.mark.parametrize("seed", [0, 6])
def test_requests_go_back_and_forth_while_pages_run_short(rules, seed):
    """The engine that decodes has no host, and computes no prompt."""
    rng = Random(seed)
    link = Link(untidy(seed), untidy(seed + 100))
    with tokens_over(link, *rules, device=28, host=0, reserve_tokens=1) as pair:
        recorder = RecordingRunner(pair.decode)
        asked = [
            greedy(f"{n}", PROMPT[: rng.randrange(1, 60)], rng.randrange(8, 40)) for n in range(8)
        ]
        for one, answer in zip(asked, pair.run(*asked), strict=True):
            assert answer == expected_tokens(one.tokens, one.sampling.max_tokens)
        assert unsaved(pair) > 0
        assert recorder.computed_tokens <= sum(one.sampling.max_tokens for one in asked)
        settle(pair)


# -- in vain -------------------------------------------------------------------------------------


def retracted(pair, tokens=4):
    """One that has so many, and of which nothing is saved."""
    pair.submit(greedy("r", PROMPT[:30], 12))
    until(pair, lambda: len(pair.outputs("r")) >= tokens, "its tokens")
    pair.decode.engine.retract(RequestId("r"))
    evict_device(pair.decode)


def assert_computed_here(pair):
    recorder = RecordingRunner(pair.decode)
    pair.drain()
    assert tokens_of(pair.outputs("r")) == expected_tokens(PROMPT[:30], 12)
    assert recorder.computed_tokens > 30
    pair.decode.engine.check()


def test_what_prefill_refuses_is_computed_where_it_decodes_and_not_asked_for_again():
    calls = []

    def refuses(asked):
        calls.append(asked)
        raise RequestError("it is too long here")

    with tokens_over(Link(), *HARD, host=0) as pair:
        pair.link.roles[PREFILL].submit_to(refuses)
        retracted(pair)
        assert_computed_here(pair)
        assert len(calls) == 1
        pair.submit(greedy("s", PROMPT[5:25], 12))
        until(pair, lambda: len(pair.outputs("s")) >= 4, "its tokens")
        pair.decode.engine.retract(RequestId("s"))
        pair.drain()
        assert len(calls) == 2, "another request may try"
        assert tokens_of(pair.outputs("s")) == expected_tokens(PROMPT[5:25], 12)
        settle(pair)


def test_where_prefill_fails_over_it_decode_does_not_wait_for_a_limit(monkeypatch):
    """By an error of its own, before what went back has come as far as its role."""

    def fails(*, prompt, **more):
        if prompt.id.startswith("again-"):
            raise ValueError("seeded")
        return Request(prompt=prompt, **more)

    monkeypatch.setattr(loop, "Request", fails)
    with tokens_over(Link(), *HARD, host=0) as pair:
        retracted(pair)
        until(pair, lambda: pair.phase(DECODE, "r") is Phase.PREFILLING, "its turn")
        assert_computed_here(pair)
        assert [out[-1].failure for out in pair.out[PREFILL].values()] == [None, Failure.INTERNAL]
        settle(pair)


@pytest.mark.parametrize("first", [PREFILL, DECODE])
def test_where_prefill_fails_over_a_client_s_request_decode_ends_at_once(monkeypatch, first):
    """Whichever side it reaches first; no deadline passes, and the name may be used again."""
    bad = True

    def fails(*, prompt, **more):
        if bad and made.pop(0) is PREFILL:
            raise ValueError("seeded")
        return Request(prompt=prompt, **more)

    monkeypatch.setattr(loop, "Request", fails)
    with tokens_over(Link(), *HARD) as pair:
        order = [first, DECODE if first is PREFILL else PREFILL]
        made = list(order)
        for side in order:
            pair.out[side]["r"] = []
            pair.sides[side].engine.submit(greedy("r", PROMPT[:30], 4))
            for _ in range(6):
                pair.step()
        until(pair, lambda: bool(pair.outputs("r")), "its end")
        assert pair.outputs("r")[-1].failure is Failure.TRANSFER
        assert "prefill has failed over it" in pair.outputs("r")[-1].reason
        assert pair.out[PREFILL]["r"][-1].failure is Failure.INTERNAL
        bad = False
        assert pair.run(greedy("r", PROMPT[:30], 4)) == [expected_tokens(PROMPT[:30], 4)]
        settle(pair)


@pytest.mark.parametrize("asked", [False, True])
def test_where_prefill_is_lost_it_is_computed_where_it_decodes(asked):
    """Before it is asked, and while its pages may be written."""
    with tokens_over(Link(), *HARD, host=0) as pair:
        link = pair.link
        link.roles[PREFILL].submit_to(lambda _: None)  # it never comes
        retracted(pair)
        if asked:
            until(pair, lambda: pair.phase(DECODE, "r") is Phase.TRANSFERRING, "the transfer")
            assert link.roles[DECODE].lease_counts().leased[0]
        link.peers[DECODE].disconnect(P)
        assert_computed_here(pair)
        assert not link.roles[DECODE].lease_counts().leased


@pytest.mark.parametrize("side", HandOffSide)
def test_an_abort_while_it_goes_back_leaves_nothing(side):
    link = Link(untidy(7), untidy(8))
    with tokens_over(link, *HARD, host=0) as pair:
        for steps in (0, 1, 2, 4, 7, 12):
            name = f"r{steps}"
            pair.submit(greedy(name, [steps, *PROMPT[:21]], 30))
            until(pair, lambda: len(pair.outputs(name)) >= 3, "its tokens")  # noqa: B023
            pair.decode.engine.retract(RequestId(name))
            for _ in range(steps):
                pair.step()
            mine = pair.sides[side].engine
            for status in mine.statuses():
                mine.abort(status.prompt.id)
            other = [steps + 1, *PROMPT[7:40]]
            assert pair.run(greedy(f"s{steps}", other, 3)) == [expected_tokens(other, 3)]
            pair.drain()
            answer = tokens_of(pair.outputs(name))
            assert answer == expected_tokens([steps, *PROMPT[:21]], 30)[: len(answer)]
            if side is PREFILL:
                assert ended(pair.outputs(name)) is FinishReason.LENGTH, "computed where it decodes"
        settle(pair)

"""Bytes under the whole engine: any mixture of groups and sidecars, conversations over three tiers,
retractions at any moment. Every row of every page is checked before each step that reads it, and
every page of every tier after each move."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from stratakv.cache.footprint import Footprints
from stratakv.core.config import EngineConfig
from stratakv.policy.admission import demand
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepWindow
from stratakv.testing.transfer_ends import cache_specs
from stratakv.tiers.flights import Flights
from stratakv.tiers.prefetch.fetches import Fetches
from stratakv.transfer.copy_plan import Direction
from tests.engines import (
    VOCABULARY,
    all_free,
    computing,
    drain,
    evict_device,
    expected_tokens,
    greedy,
    retract_youngest,
    tokens_of,
    without_anchor_bytes,
)
from tests.pattern_engine import pattern_engine, verify_pages
from tests.storage_cases import PATIENT, Shelf, attach_backend, evict_all, format_of

MOST = 60
ANSWER = 5


@st.composite
def engine_specs(draw):
    """Rows are short, so that many steps cost little. An anchor has no bytes only where another
    group can end a prefix."""
    spec = draw(cache_specs(widest=5, fewest=1))
    rules = [group.retention for group in spec.groups[1:]]
    ends = any(isinstance(rule, KeepBoundary | KeepWindow | KeepAll) for rule in rules)
    return without_anchor_bytes(spec) if ends and draw(st.booleans()) else spec


class Users:
    """Three conversations of one stem over an engine that nothing is computed in."""

    def __init__(self, parts, shelf, seed):
        self.parts = parts
        self.shelf = shelf
        self.random = np.random.default_rng(seed)
        self.stem = self.utterance(9)
        self.talks = [list(self.stem) for _ in range(3)]
        self.asked = 0
        self.moved = 0

    def utterance(self, most):
        return self.random.integers(0, VOCABULARY, int(self.random.integers(1, most))).tolist()

    def ask(self, retract):
        """One or two go on at once; of those that run one may have to leave in between."""
        asked = {}
        for user in self.random.permutation(3)[: self.random.integers(1, 3)].tolist():
            talk = self.talks[user] + self.utterance(12)
            if len(talk) + ANSWER > MOST:
                talk = self.stem + self.utterance(12)
            name = f"{self.asked} {user}"
            asked[name] = user, talk
            self.parts.engine.submit(greedy(name, talk, ANSWER))
        self.asked += 1
        out = []
        for _ in range(int(self.random.integers(1, 6))):
            out += self.parts.engine.step()
        if retract and computing(self.parts):
            retract_youngest(self.parts)
            self.parts.engine.check()
        out += drain(self.parts)
        for name, (user, talk) in asked.items():
            answer = tokens_of([output for output in out if output.request == name])
            assert answer == expected_tokens(talk, ANSWER)
            self.talks[user] = talk + answer

    def verify(self):
        self.moved += verify_pages(self.parts, self.shelf)


def converse(spec, moves, seed):
    page = spec.page_tokens
    config = EngineConfig(
        page_tokens=page, max_running=3, max_model_len=MOST, chunk_tokens=9, step_tokens=20,
        reserve_tokens=1, snapshot_tokens=2 * page, load_back_threshold=1, **PATIENT,
    )  # fmt: skip
    peak = demand(spec, MOST, MOST, config.chunk_tokens, 0).peak
    device = [-(-2 * MOST // page), *(3 * pages for pages in peak[1:])]
    shelf = Shelf(format_of(spec))
    with pattern_engine(spec, config, device, [2 * n for n in device]) as parts:
        attach_backend(parts, shelf)
        users = Users(parts, shelf, seed)
        for move in moves:
            match move:
                case "ask" | "retract":
                    users.ask(move == "retract")
                case "off the device":
                    evict_device(parts)
                case _:
                    evict_all(SimpleNamespace(parts=parts, spec=spec))
            users.verify()
        assert parts.engine.flush()
        parts.engine.check()
        assert all_free(parts)
        return users


MOVES = st.lists(
    st.sampled_from(["ask", "retract", "off the device", "off both"]), min_size=3, max_size=10
)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(engine_specs(), MOVES, st.integers(0, 1000))
def test_every_page_is_what_its_tokens_say(spec, moves, seed):
    converse(spec, moves, seed)


# -- the test has teeth --------------------------------------------------------------------------


def fetch_into_another_page(patch):
    right = Fetches.buffers
    patch.setattr(Fetches, "buffers", lambda self, plan, pages: right(self, plan, pages)[::-1])


def forget_live_states(patch):
    """A retracted request's state stays behind; its partly filled pages come back."""
    right = Footprints._own

    def own(self, row, tokens):
        live = [page for page in right(self, row, tokens) if page.index >= 0]
        return live if any(self._live.owned(row, group) >= 0 for group in self._live.groups) else []

    patch.setattr(Footprints, "_own", own)


def merge_in_another_order(patch):
    """Two ends of a copy disagree about the order of the pages that it merges."""
    right = Flights._send

    def send(self, direction, ticket, parts):
        mixed = [replace(part, host=part.host[::-1].copy()) for part in parts]
        return right(self, direction, ticket, mixed if direction is Direction.LOAD else parts)

    patch.setattr(Flights, "_send", send)


@pytest.mark.parametrize(
    "bug", [fetch_into_another_page, forget_live_states, merge_in_another_order]
)
def test_a_seeded_bug_is_seen(bug, monkeypatch):
    bug(monkeypatch)

    seen: list[str] = []

    @settings(
        max_examples=400,  # those after the first that sees it cost nothing
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(engine_specs(), MOVES, st.integers(0, 1000))
    def broken(spec, moves, seed):
        """Copies end when they end: a run that failed may not fail when it is repeated."""
        if not seen:
            try:
                converse(spec, moves, seed)
            except (AssertionError, ValueError) as error:  # pages of another size are refused
                seen.append(str(error))

    broken()
    assert seen  # by the bytes, or by who looks before they are read; unseeded runs fail nowhere

"""Conversations of many users over pools that hold a part of them and storage that misbehaves,
through restarts: every token and logit is that of a run without a cache.
"""

import logging
from dataclasses import replace

import numpy as np
import pytest

from stratakv.core.ids import RequestId
from stratakv.policy.admission import demand
from stratakv.testing.storage_faults import Faults, FaultyBackend
from tests.hit_cases import prompt, spec_for
from tests.storage_cases import check_sums, of_each, settled, shelf_for, shelf_lab

PAGE = 16
MOST = 260
"""Tokens of the longest conversation; it ends then, and another one begins."""
FAULTS = Faults(
    call_fails=0.02, read_misses=0.02, read_fails=0.02, read_corrupt=0.02, write_refused=0.03,
    write_fails=0.02,
)  # fmt: skip
POLICIES = (
    {"write_policy": "write-through"},
    {"write_policy": "write-through-selective", "write_hits": 2},
    {"write_policy": "write-back", "write_back_reserve": 0.3},
)
SYSTEM = prompt(PAGE, 800, 53)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="stratakv")


class Users:
    """Each continues its own conversation, begins another one, or asks again what it asked."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.talks: list[list[int]] = [[] for _ in range(6)]
        self.asked = 0

    def next(self, user: int) -> list[int]:
        talk = self.talks[user]
        if not talk or len(talk) > MOST - 60 or self.rng.random() < 0.1:
            system = SYSTEM if self.rng.random() < 0.6 else []
            talk = [*system, *self._fresh(90)]
        elif self.rng.random() < 0.2:
            return talk[: int(self.rng.integers(1, len(talk)))] + self._fresh(20)
        else:
            talk = talk + self._fresh(40)
        self.talks[user] = talk
        return talk

    def _fresh(self, most: int) -> list[int]:
        self.asked += 1
        return prompt(PAGE, 1000 + self.asked, int(self.rng.integers(1, most)))


def serve(this, users: Users, rounds: int) -> None:
    rng = users.rng
    engine = this.parts.engine
    for turn in range(rounds):
        asked = {}
        for user in rng.permutation(6)[: rng.integers(1, 5)].tolist():
            name = f"{turn}.{user}"
            asked[name] = user, users.next(user)
            this.submit(name, asked[name][1], int(rng.integers(1, 7)))
            for _ in range(int(rng.integers(0, 3))):
                this.step()
        if rng.random() < 0.2:
            gone = str(rng.choice(list(asked)))
            if engine.status(RequestId(gone)) is not None:
                engine.abort(RequestId(gone))
                this.step()
                del asked[gone]
        this.drain()
        for name, (user, tokens) in asked.items():
            if tokens is users.talks[user]:
                users.talks[user] = [*tokens, *this.answers[name].tokens]
    settled(this)
    check_sums(this)
    engine.check()


def campaign(family: str, seed: int, lives: int, rounds: int) -> int:
    spec = spec_for(family, PAGE)
    peak = demand(spec, MOST, MOST, 40, 0).peak
    device = tuple(2 * pages + 3 for pages in peak)
    shelf = shelf_for(family, PAGE, quota_bytes=60 * sum(g.page_bytes for g in spec.groups))
    users, came = Users(seed), 0
    for life in range(lives):
        settings = POLICIES[(seed + life) % 3] | {
            "prefetch_policy": ("wait-complete", "best-effort", "timeout")[life % 3],
            "reserve_tokens": 1,
            "snapshot_tokens": PAGE,
            "host": tuple(pages // (1 + life % 2) + 4 for pages in device),
            "prefetch_share": 1.0,
        }
        backend = FaultyBackend(shelf, replace(FAULTS, seed=100 * seed + life))
        with shelf_lab(family, PAGE, backend, device=device, **settings) as this:
            serve(this, users, rounds)
            came += this.parts.engine.stats().cached_storage_tokens
    return came


@of_each(quick=("gemma3",))
def test_conversations(family):
    assert campaign(family, seed=1, lives=3, rounds=6) > 0


@pytest.mark.long
@of_each()
@pytest.mark.parametrize("seed", [2, 3])
def test_many_conversations(family, seed):
    assert campaign(family, seed, lives=6, rounds=15) > 0

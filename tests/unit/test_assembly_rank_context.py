"""Ranks that were not started alike find out, on each of them, and take what all of them have."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from stratakv.agreement.agreement import Agreement
from stratakv.agreement.ranks import SingleRank
from stratakv.assembly.build import Sockets, build
from stratakv.assembly.cache import allocators
from stratakv.assembly.engine_plan import EnginePlan
from stratakv.assembly.rank_context import RankContext, check_alike, heartbeat_s
from stratakv.assembly.sizing import Sizes, ranks_here
from stratakv.bench.policy_cache import NoMemory
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.storage.store_key import StoreKey
from stratakv.testing.patience import PATIENCE_S
from tests.engines import token_spec
from tests.unit.test_testing_fleet_thread_ranks import together

CONFIG = EngineConfig(tp=2, storage="redis://:secret@here/0")


class TwoRanks:
    """Ranks as threads; both meet in ``gather`` alone."""

    size = 2

    def __init__(self, rank, texts, barrier):
        self.rank = rank
        self._texts = texts
        self._barrier = barrier

    def gather(self, text):
        self._texts[self.rank] = text
        self._barrier.wait(PATIENCE_S)
        return list(self._texts)


def statuses(*started) -> list[str | None]:
    """Of each rank, what it refuses; ``started``: its config, fingerprint and digest."""
    texts, barrier = ["", ""], threading.Barrier(2)

    def one(rank):
        try:
            check_alike(RankContext.of(TwoRanks(rank, texts, barrier)), *started[rank])
        except ConfigError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def test_ranks_that_are_alike_go_on():
    other = replace(CONFIG, storage="redis://:another@there/0")
    assert statuses((CONFIG, b"w", b"d"), (other, b"w", b"d")) == [None, None]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("load_back_threshold", 7),
        ("eviction", "lfu"),
        ("host_memory", "1GiB"),
        ("max_running", 3),
        ("page_tokens", 32),
        ("prefetch_policy", "best-effort"),
        ("tp_timeout", 3.0),
        ("storage_shards", 8),
    ],
)
def test_another_setting_is_refused_on_both_with_its_flag(name, value):
    flag, ours = f"--{name.replace('_', '-')}", getattr(CONFIG, name)
    wanted = f"rank 0 has {flag}: {ours}, rank 1 has {flag}: {value}; all must agree"
    other = replace(CONFIG, **{name: value})
    assert statuses((CONFIG, b"w", b"d"), (other, b"w", b"d")) == [wanted, wanted]


def test_ranks_need_one_key_wherever_each_has_its_file():
    here, there = (replace(CONFIG, storage_key_file=path) for path in ("/here", "/there"))
    one, two = StoreKey(b"1" * 32), StoreKey(b"2" * 32)
    assert statuses((here, b"w", b"d", one), (there, b"w", b"d", one)) == [None, None]
    for other, shown in ((two, two.id.hex()), (None, "None")):
        wanted = (
            f"rank 0 has --storage-key-file with key: {one.id.hex()}, rank 1 has "
            f"--storage-key-file with key: {shown}; all must agree"
        )
        assert statuses((here, b"w", b"d", one), (there, b"w", b"d", other)) == [wanted, wanted]


def test_a_rank_without_storage_is_refused_and_no_url_is_reported():
    found = statuses((CONFIG, b"w", b"d"), (replace(CONFIG, storage=None), b"w", b"d"))
    assert found[0] == found[1]
    assert found[0] is not None
    assert re.match("rank 0 has --storage: True, rank 1 has --storage: False", found[0])


@pytest.mark.parametrize("other", [(b"x", b"d"), (b"w", b"x")])
def test_other_weights_or_caches_are_refused(other):
    first, second = statuses((CONFIG, b"w", b"d"), (CONFIG, *other))
    assert first == second
    assert first is not None


@pytest.mark.parametrize("timeout_s", [1.0, 3.0, 5.0, 120.0, 1e6])
def test_ranks_without_work_meet_well_before_they_count_as_lost(timeout_s):
    assert heartbeat_s(replace(CONFIG, tp_timeout=timeout_s)) <= timeout_s / 4


def test_ranks_of_one_machine_share_what_is_free(monkeypatch):
    assert ranks_here(CONFIG) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert ranks_here(CONFIG) == 1


def test_ranks_take_the_least_of_every_size():
    given = {"spec": None, "sharding": None, "notice": None}
    mine = Sizes(device=(10, 20), host=(30, 5), max_model_len=400, **given)
    theirs = Sizes(device=(12, 8), host=(3, 50), max_model_len=300, **given)
    statuses = together(
        *[lambda ranks: RankContext.of(ranks).all_reduce_min((mine, theirs)[ranks.rank])] * 2
    )
    wanted = {"device": (10, 8), "host": (3, 5), "max_model_len": 300}
    assert statuses == [replace(mine, **wanted), replace(theirs, **wanted)]


class Watching(Agreement):
    def __init__(self, ranks):
        super().__init__(ranks)
        self.names = []

    def watch(self, name, *what):
        self.names.append(name)
        super().watch(name, *what)


def test_whoever_builds_ranks_has_them_compare_their_caches_and_who_runs():
    spec = token_spec(4)
    plan = EnginePlan.of(EngineConfig(page_tokens=4), Sizes.of(spec, [90], [40], 64), b"model")
    agreement = Watching(SingleRank())
    sockets = Sockets(ranks=RankContext.of(SingleRank(), agreement=agreement))
    engine, _ = build(plan, NoMemory(allocators(plan)), lambda _: None, sockets)
    assert agreement.names == [
        "the tree", "free pages", "copies", "storage", "the tables", "requests"
    ]  # fmt: skip
    engine.close()

"""Random traffic over random caches, with copies that are slow or fail and aborts at any moment:
every answer right, every page accounted for, nothing left behind.
"""

import logging
from collections import Counter

import numpy as np
import pytest

from stratakv.core.choices import EVICTIONS, WRITE_POLICIES
from stratakv.core.config import EngineConfig
from stratakv.core.errors import RankLostError
from stratakv.policy.admission import demand
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepChunk, KeepLive, KeepWindow
from stratakv.transfer.cpu import DEFAULT_COPIER
from tests.churn import Traffic, UnevenCopier, churn
from tests.engines import token_engine, token_spec, without_anchor_bytes

PAGE = 4
MOST = 100
SPECS = {
    "anchor": token_spec(PAGE),
    "window": token_spec(PAGE, KeepWindow(10)),
    "chunk": token_spec(PAGE, KeepChunk(11)),
    "state": token_spec(PAGE, KeepBoundary()),
    "state alone": without_anchor_bytes(token_spec(PAGE, KeepBoundary())),
    "all": token_spec(PAGE, KeepBoundary(), KeepWindow(6), KeepLive(), KeepAll()),
}


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Copies fail by the thousand; each would be logged with its traceback."""
    caplog.set_level(logging.CRITICAL, logger="stratakv")


def config(cache="host", **settings):
    plain = {"page_tokens": PAGE, "max_running": 4, "max_model_len": MOST, "chunk_tokens": 9}
    plain |= {"step_tokens": 20, "reserve_tokens": 1, "snapshot_tokens": 8}
    return EngineConfig(**{**plain, "cache": cache, "load_back_threshold": 1, **settings})


def pools(spec, anchor, host):
    peak = demand(spec, MOST, MOST, 9, 0).peak
    device = [anchor if group.keeps_all else 4 * peak[group.id] for group in spec.groups]
    return device, [host] * len(device)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(
    ("cache", "host"), [("off", 0), ("device", 0), ("host", 12), ("host", 150)]
)
def test_traffic_under_pressure(spec, cache, host):
    traffic = Traffic(seed=host, requests=24, aborts=0.05, check_every=3)
    copier = UnevenCopier(host, 5) if host == 12 else DEFAULT_COPIER
    counters = churn(spec, config(cache), *pools(spec, 40, host), traffic, copier)
    if host != 12:  # of slow copies it depends who must leave, and a small host may save nothing
        assert counters.retracted > 0
        assert (counters.load_pages > 0) == (cache == "host")
        assert (counters.retracted_unsaved < counters.retracted) == (cache == "host")


def aborts(count, seed, spec):
    """Small requests, most of which are aborted at some moment."""
    traffic = Traffic(
        seed,
        requests=10**9,
        at_once=8,
        prompt_tokens=20,
        output_tokens=50,
        aborts=0.6,
        most_aborts=count,
        check_every=25,
    )
    copier = UnevenCopier(seed, 10)
    settings = config(max_model_len=60)
    return traffic, churn(spec, settings, *pools(spec, 15, 60), traffic, copier)


SHARES = {
    "anchor": 500, "window": 400, "chunk": 300, "state": 300, "state alone": 300, "all": 200,
}  # fmt: skip
"""Of two thousand aborts; more where they cost less."""


def test_the_shares_are_two_thousand_aborts_over_every_spec():
    assert (sum(SHARES.values()), SHARES.keys()) == (2_000, SPECS.keys())


@pytest.mark.parametrize("name", SHARES)
def test_two_thousand_aborts_at_random_moments(name):
    traffic, counters = aborts(SHARES[name], 1, SPECS[name])
    assert traffic.aborted == SHARES[name]
    # Waiting, prefilling, decoding; how many were retracted just then is a matter of timing.
    assert len(traffic.aborted_in) >= 3, traffic.aborted_in
    assert counters.retracted > counters.retracted_unsaved
    assert counters.load_pages > 0


@pytest.mark.long
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_ten_thousand_aborts_of_each_spec(spec):
    traffic, _ = aborts(10_000, 2, spec)
    assert traffic.aborted == 10_000


# -- any cache -----------------------------------------------------------------------------------


def policies(rng, cache):
    """An eviction policy and, where there is a host, a write policy with its own setting."""
    drawn = {"eviction": str(rng.choice(EVICTIONS))}
    if cache == "host":
        drawn["write_policy"] = str(rng.choice(WRITE_POLICIES))
    match drawn.get("write_policy"):
        case "write-through-selective":
            drawn["write_hits"] = int(rng.integers(1, 4))
        case "write-back":
            drawn["write_back_reserve"] = float(rng.choice([0.05, 0.3, 1.0]))
    return drawn


def drawn(seed):
    """Any rules, policies and limits, pools from the least that serves one request up; and its
    traffic."""
    rng = np.random.default_rng(seed)

    def among(low, high):
        return int(rng.integers(low, high))

    page, most, running = int(rng.choice([1, 2, 4])), among(40, 130), among(1, 6)
    rules = (
        lambda: KeepWindow(among(1, 12)),
        lambda: KeepChunk(among(1, 12)),
        KeepBoundary,
        KeepLive,
        KeepAll,
    )
    spec = token_spec(page, *(rules[among(0, 5)]() for _ in range(among(0, 4))))
    cache = str(rng.choice(["off", "device", "host", "host"]))
    settings = config(
        cache,
        page_tokens=page,
        max_model_len=most,
        max_running=running,
        step_tokens=running + among(1, 40),
        chunk_tokens=among(1, 20),
        reserve_tokens=among(1, 4),
        snapshot_tokens=page * among(1, 6),
        load_back_threshold=among(0, 10),
        **policies(rng, cache),
    )
    peak = demand(spec, most, most, settings.chunk_tokens, 0).peak
    device = [
        pages * (1 if group.keeps_all else running) + among(0, pages + 2)
        for group, pages in zip(spec.groups, peak, strict=True)
    ]
    host = [among(1, 3 * pages + 2) if cache == "host" else 0 for pages in peak]
    traffic = Traffic(
        seed,
        requests=25,
        aborts=float(rng.choice([0, 0.05, 0.3])),
        at_once=among(4, 9),
        prompt_tokens=among(4, 40),
        output_tokens=among(20, 90),
    )
    return spec, settings, device, host, traffic, UnevenCopier(seed, int(rng.choice([0, 0, 5])))


@pytest.mark.parametrize("seed", range(5))
def test_any_cache(seed):
    churn(*drawn(seed))


@pytest.mark.long
@pytest.mark.parametrize("block", range(4))
def test_many_caches(block):
    """Each seed is a ``test_any_cache`` of its own; together they must have seen everything."""
    totals = Counter()
    for seed in range(100 + 100 * block, 200 + 100 * block):
        try:
            totals.update(churn(*drawn(seed)).snapshot())
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    unseen = {name for name, count in totals.items() if not count} - {"load_waited"}
    assert not unseen, f"never happened: {unseen}"


def test_an_engine_whose_ranks_are_lost_in_a_retraction_still_ends(monkeypatch):
    spec = SPECS["window"]
    with token_engine(spec, config("device"), *pools(spec, 40, 0)) as parts:

        def lost(*_arguments):
            raise RankLostError("in the wait of a retraction")

        monkeypatch.setattr(parts.cache, "retract", lost)
        with pytest.raises(RankLostError):
            Traffic(seed=1, requests=24).run(parts, MOST)
        parts.engine.close()
        assert parts.cache.progress.flush()

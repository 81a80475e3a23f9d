"""What a cache tells of itself, rebuilt from the telling alone, under the engine's real traffic."""

import hashlib
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from stratakv.assembly.build import Sockets
from stratakv.core.config import EngineConfig
from stratakv.core.ids import GroupId
from stratakv.core.page_keys import Namespace, PageHasher, page_keys
from stratakv.spec.retention import KeepBoundary, KeepWindow
from stratakv.storage.memory import MemoryBackend
from stratakv.tiers.events import (
    AllCleared,
    CacheEvents,
    Medium,
    PagesRemoved,
    PagesStored,
    tenant_of,
)
from stratakv.transfer.cpu import DEFAULT_COPIER
from stratakv.tree.nodes import Tier
from tests.churn import Traffic, UnevenCopier
from tests.engines import evict, evict_device, greedy, run, token_engine, token_spec
from tests.replica import Replica, readable
from tests.storage_cases import attach_backend, format_of

PAGE = 4
CONFIG = EngineConfig(
    page_tokens=PAGE, max_running=4, max_model_len=160, chunk_tokens=16, step_tokens=32,
    reserve_tokens=8, load_back_threshold=0, snapshot_tokens=PAGE * 2,
)  # fmt: skip
SECRET = "a tenant's secret"


class Follower:
    """Holds every record against what it must say, and a replica against the tree."""

    def __init__(self, spec, adapters):
        self.events = CacheEvents(spec.page_tokens, adapters)
        self.replica = Replica()
        self.received: list = []
        self.tokens: dict[bytes, tuple] = {}  # a page's own, by key
        self.namespaces: dict[tuple, Namespace] = {}

    def step(self, tree):
        for event in self.events.take():
            self.received.append(event)
            match event:
                case PagesStored():
                    self.replica.store(event.medium.value, event.group, event.keys)
                    self.believe(event)
                case PagesRemoved():
                    self.replica.remove(event.medium.value, event.group, event.keys)
                case AllCleared():
                    self.replica.clear()
        found = self.replica.known()
        found.pop((Medium.STORAGE.value, 0), None)
        assert found == readable(tree)
        assert len(self.events) == len(tree), "tokens of pages that have left"

    def believe(self, event):
        """Keys follow from parent and tokens: nothing is told that a follower cannot verify."""
        previous = event.parent or self.namespaces[event.tenant, event.lora].root()
        assert len(event.tokens) == PAGE * len(event.keys)
        assert event.tokens.dtype == np.int32
        for key, tokens in zip(event.keys, event.tokens.reshape(-1, PAGE), strict=True):
            assert hashlib.sha256(previous + tokens.tobytes()).digest() == key
            previous = key


@contextmanager
def followed(rules, device, host, copier=DEFAULT_COPIER, config=CONFIG):
    spec = token_spec(PAGE, *rules)
    follower = Follower(spec, {})
    sockets = Sockets(observer=follower.events)
    made = token_engine(spec, config, device, host, copier, sockets=sockets)
    with made as parts:
        step = parts.engine.step
        base = Namespace(model=b"tokens", spec_digest=spec.digest)
        for salt in ("", "other", SECRET):
            follower.namespaces[tenant_of(salt), ""] = base.salted(salt)

        def step_and_follow():
            outputs = step()
            follower.step(parts.cache.tiers.tree)
            return outputs

        parts.engine.step = step_and_follow
        yield parts, follower


@pytest.mark.parametrize(
    ("rules", "device", "host"),
    [
        ([], [40], [30]),
        ([KeepWindow(12)], [44, 34], [24, 20]),
        ([KeepBoundary()], [44, 24], [24, 12]),
    ],
    ids=["full", "window", "state"],
)
@pytest.mark.parametrize("seed", range(2))
def test_the_events_alone_rebuild_the_cache_after_every_step(rules, device, host, seed):
    copier = UnevenCopier(seed, fail=15)
    with followed(rules, device, host, copier) as (parts, follower):
        Traffic(seed=seed, aborts=0.05, check_every=8).run(parts, CONFIG.max_model_len)
        parts.cache.progress.settle()
        follower.step(parts.cache.tiers.tree)
        groups = {(type(event), event.medium, event.group) for event in follower.received}
        assert len(groups) == 4 * (1 + len(rules)), "the traffic missed a tier or a group"
        assert {e.tenant for e in follower.received if isinstance(e, PagesStored)} == {
            "", tenant_of("other"),
        }  # fmt: skip
        assert parts.cache.progress.flush()
        follower.step(parts.cache.tiers.tree)
        assert follower.received[-1] == AllCleared()
        assert not follower.replica.known()
        assert not len(follower.events)


def test_a_chain_is_reported_with_its_parent_and_moves_tier_by_tier():
    tokens = list(range(1, 14))
    with followed([], [20], [20]) as (parts, follower):
        run(parts, greedy("a", tokens, 1))
        parts.cache.progress.settle()
        follower.step(parts.cache.tiers.tree)
        keys = page_keys(np.array(tokens, np.int32), follower.namespaces["", ""], PAGE)
        stored = [event for event in follower.received if event.medium is Medium.DEVICE]
        assert [key for event in stored for key in event.keys] == keys
        assert stored[0].parent is None
        assert np.concatenate([event.tokens for event in stored]).tolist() == tokens[: PAGE * 3]
        saved = [event for event in follower.received if event.medium is Medium.HOST]
        assert [key for event in saved for key in event.keys] == keys
        follower.received.clear()
        evict_device(parts)
        follower.step(parts.cache.tiers.tree)
        (gone,) = follower.received
        assert (gone.medium, gone.group, set(gone.keys)) == (Medium.DEVICE, 0, set(keys))
        follower.received.clear()
        run(parts, greedy("b", tokens, 1))
        parts.cache.progress.settle()
        follower.step(parts.cache.tiers.tree)
        back = [key for event in follower.received for key in event.keys]
        assert back == keys
        assert {event.medium for event in follower.received} == {Medium.DEVICE}


def test_what_comes_back_from_storage_is_reported_whole_and_with_its_tenant():
    tokens = list(range(1, 14))
    patient = replace(CONFIG, prefetch_policy="wait-complete", prefetch_threshold=1)
    with followed([], [20], [20], config=patient) as (parts, follower):
        attach_backend(parts, MemoryBackend(format_of(parts.spec), 1 << 20))
        run(parts, greedy("a", tokens, 1, salt=SECRET))
        parts.cache.progress.settle()
        evict_device(parts)
        evict(parts, Tier.HOST, 0)
        follower.step(parts.cache.tiers.tree)
        keys = page_keys(
            np.array(tokens, np.int32), follower.namespaces[tenant_of(SECRET), ""], PAGE
        )
        kept = [event for event in follower.received if event.medium is Medium.STORAGE]
        assert [key for event in kept for key in event.keys] == keys
        assert not follower.replica.pages["GPU", 0] | follower.replica.pages["CPU", 0]
        follower.received.clear()
        run(parts, greedy("b", tokens, 1, salt=SECRET))
        parts.cache.progress.settle()
        follower.step(parts.cache.tiers.tree)
        landed = [event for event in follower.received if event.medium is Medium.HOST]
        assert [key for event in landed for key in event.keys] == keys
        assert {event.tenant for event in landed} == {tenant_of(SECRET)}


def test_a_tenant_shows_as_a_digest_and_never_as_its_salt():
    tokens = list(range(1, 14))
    with followed([], [40], [20]) as (parts, follower):
        run(parts, greedy("a", tokens, 1), greedy("b", tokens, 1, salt=SECRET))
        run(parts, greedy("c", tokens, 1, salt="other"))
        parts.cache.progress.settle()
        follower.step(parts.cache.tiers.tree)
        by_tenant: dict[str, set] = {}
        for event in follower.received:
            by_tenant.setdefault(event.tenant, set()).update(event.keys)
        assert set(by_tenant) == {"", tenant_of(SECRET), tenant_of("other")}
        assert sum(map(len, by_tenant.values())) == len(set().union(*by_tenant.values())) == 9
        digest = hashlib.sha256(b"stratakv-tenant-1:" + SECRET.encode()).hexdigest()
        assert tenant_of(SECRET) == digest[:32]
        assert SECRET not in repr(follower.received)


def described(count, salt="", adapter=b"", names=None):
    events = CacheEvents(PAGE, names or {})
    namespace = Namespace(model=b"m", spec_digest=b"s", salt=salt, adapter=adapter)
    prefix = PageHasher(namespace, PAGE)
    tokens = np.arange(count * PAGE + 1, dtype=np.int32)
    keys = prefix.extend(tokens)
    events.inserted(prefix.namespace, keys, 0, tokens)
    return events, list(keys)


def test_pages_of_an_adapter_carry_its_name():
    events, keys = described(2, adapter=b"digest", names={"poet": b"digest"})
    events.stored(Medium.STORAGE, GroupId(0), keys)
    assert [event.lora for event in events.take()] == ["poet"]


def test_what_storage_holds_is_reported_chain_by_chain():
    events, keys = described(5)
    events.stored(Medium.STORAGE, GroupId(1), [keys[0], keys[1], keys[3], keys[4]])
    one, two = events.take()
    assert (one.medium, one.group, one.parent) == (Medium.STORAGE, 1, None)
    assert list(one.keys) == keys[:2]
    assert one.tokens.tolist() == list(range(2 * PAGE))
    assert (list(two.keys), two.parent) == (keys[3:], keys[2])
    assert two.tokens.tolist() == list(range(3 * PAGE, 5 * PAGE))


def test_pages_of_unknown_tokens_are_reported_without_them():
    events, keys = described(2)
    stranger = page_keys(np.ones(PAGE, np.int32), Namespace(model=b"x", spec_digest=b"y"), PAGE)
    events.stored(Medium.STORAGE, GroupId(0), [*keys, *stranger])
    (received,) = events.take()
    assert list(received.keys) == keys + stranger
    assert (received.parent, len(received.tokens)) == (None, 0)


def test_a_flush_voids_what_was_noted_before_it():
    events, keys = described(2)
    events.stored(Medium.STORAGE, GroupId(0), keys)
    events.dropped()
    assert events.take() == [AllCleared()]
    assert events.take() == []

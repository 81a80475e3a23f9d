"""KV events on the wire: vLLM's classes decode them, a late follower catches up, and nobody who is
slow or absent holds a step up."""

import re
import socket
import threading
from contextlib import contextmanager
from unittest import mock

import msgspec
import numpy as np
import pytest
import zmq

from stratakv.core.clock import ManualClock
from stratakv.core.errors import ConfigError
from stratakv.core.ids import GroupId
from stratakv.core.page_keys import Namespace, page_keys
from stratakv.serve.kv_events import KvEventPublisher, KvEventsOptions
from stratakv.serve.kv_wire import Encoder, hashes_of
from stratakv.spec.retention import KeepBoundary, KeepChunk, KeepWindow
from stratakv.testing.patience import PATIENCE_S, wait_until
from stratakv.tiers.events import (
    AllCleared,
    CacheEvents,
    Medium,
    PagesRemoved,
    PagesStored,
    tenant_of,
)
from tests.engines import token_spec
from tests.kv_subscriber import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    Subscriber,
    decode,
)

PAGE = 4
SPEC = token_spec(PAGE, KeepWindow(8), KeepChunk(8), KeepBoundary())
TOKENS = np.arange(100, 100 + 3 * PAGE, dtype=np.int32)


def keys_for(salt="", tokens=TOKENS):
    return page_keys(tokens, Namespace(model=b"m", spec_digest=b"s", salt=salt), PAGE)


def stored(first=1, group=0, medium=Medium.DEVICE, salt="", lora=""):
    keys = keys_for(salt)
    parent = keys[first - 1] if first else None
    tokens = TOKENS[first * PAGE :]
    return PagesStored(
        medium, GroupId(group), keys[first:], parent, tokens, tenant_of(salt), lora
    )  # fmt: skip


def last_64_bits(key):
    return int.from_bytes(key, "big") & (2**64 - 1)


# -- the form -------------------------------------------------------------------------------------


def sent(*events):
    return decode(Encoder(SPEC).encode(events, 12.5))


def test_a_stored_chain_decodes_as_vllms_block_stored():
    batch = sent(stored(first=1, lora="poet"))
    keys = [last_64_bits(key) for key in keys_for()]
    assert batch == KVEventBatch(
        12.5,
        [
            BlockStored(
                block_hashes=keys[1:],
                parent_block_hash=keys[0],
                token_ids=TOKENS[PAGE:].tolist(),
                block_size=PAGE,
                lora_id=None,
                medium="GPU",
                lora_name="poet",
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
        ],
        0,
    )


def test_removed_and_cleared_decode_as_vllms():
    keys = keys_for()
    batch = sent(PagesRemoved(Medium.HOST, GroupId(2), keys), AllCleared())
    removed = BlockRemoved([last_64_bits(key) for key in keys], "CPU", group_idx=2)
    assert batch.events == [removed, AllBlocksCleared()]


def test_a_batch_is_an_array_and_an_event_a_map():
    plain = msgspec.msgpack.decode(Encoder(SPEC).encode([stored(first=0)], 1.0))
    assert (plain[0], plain[2], len(plain)) == (1.0, 0, 3)
    (event,) = plain[1]
    assert event["type"] == "BlockStored"
    assert event["parent_block_hash"] is None  # a field without a default stays
    assert not {"extra_keys", "kv_cache_spec_sliding_window"} & event.keys()


@pytest.mark.parametrize(
    ("group", "kind", "window"),
    [
        (0, "full_attention", None),
        (1, "sliding_window", 8),
        (2, "chunked_local_attention", None),
        (3, "mamba", None),
    ],
)
def test_a_group_says_of_what_kind_it_is(group, kind, window):
    (event,) = sent(stored(group=group)).events
    assert (event.group_idx, event.kv_cache_spec_kind) == (group, kind)
    assert event.kv_cache_spec_sliding_window == window


@pytest.mark.parametrize(("medium", "word"), [("DEVICE", "GPU"), ("HOST", "CPU")])
def test_a_tier_has_vllms_word(medium, word):
    (event,) = sent(stored(medium=Medium[medium])).events
    assert event.medium == word
    assert Medium.STORAGE.value == "STORAGE"


def test_every_block_of_a_tenant_names_it_and_never_collides_with_anothers():
    salts = ("", "a secret", "another")
    payload = Encoder(SPEC).encode([stored(first=0, salt=salt) for salt in salts], 1.0)
    assert b"secret" not in payload
    plain, one, other = decode(payload).events
    assert plain.extra_keys is None
    assert one.extra_keys == [(tenant_of("a secret"),)] * 3
    assert other.extra_keys == [(tenant_of("another"),)] * 3
    assert plain.token_ids == one.token_ids == other.token_ids
    hashes = [*plain.block_hashes, *one.block_hashes, *other.block_hashes]
    assert len(set(hashes)) == 9


def test_a_hash_is_the_keys_last_64_bits_whatever_they_are():
    keys = [bytes(32), bytes(24) + b"\xff" * 8, bytes(31) + b"\x01"]
    assert hashes_of(keys) == [0, 2**64 - 1, 1]


# -- the publisher --------------------------------------------------------------------------------


@contextmanager
def publisher(on_dropped=lambda: None, **options):
    options = {"endpoint": "tcp://127.0.0.1:*", "replay": "tcp://127.0.0.1:*"} | options
    made = KvEventPublisher(KvEventsOptions(**options), ManualClock(7.0), on_dropped)
    try:
        yield made
    finally:
        made.close()


def ends(made):
    """Where a test connects to."""
    stats = made.stats()
    return stats.endpoint, stats.replay or None


def publish(made, *events):
    with mock.patch.object(CacheEvents, "take", return_value=list(events)):
        made.step_done()


def refuses(*_):
    raise BlockingIOError


def subscribed(follower, made, *events):
    """Publish until ``follower`` has heard something: a SUB takes a moment to be known."""
    for _ in range(500):
        publish(made, *events)
        number = follower.receive(10)
        if number is not None:
            return number
    raise AssertionError("nothing was heard")


def drain(follower, last):
    while (number := follower.receive()) is not None and number < last:
        pass


def test_a_follower_gets_one_batch_per_step_in_order():
    with publisher(topic="kv@pod@model") as made, Subscriber(*ends(made), topic="kv@") as follower:
        made.observe(SPEC, {})
        first = subscribed(follower, made, AllCleared())
        publish(made, stored(first=0), PagesRemoved(Medium.DEVICE, GroupId(0), keys_for()))
        made.step_done()  # a step without news is no batch
        publish(made, AllCleared())
        drain(follower, made.stats().batches - 1)
        assert list(follower.batches) == list(range(first, made.stats().batches))
        kinds = [[type(event).__name__ for event in b.events] for b in follower.batches.values()]
        assert kinds[-2:] == [["BlockStored", "BlockRemoved"], ["AllBlocksCleared"]]
        assert follower.topics == {"kv@pod@model"}
        assert {batch.ts for batch in follower.batches.values()} == {7.0}


def test_who_joins_late_catches_up_by_a_replay():
    with publisher() as made:
        made.observe(SPEC, {})
        for _ in range(5):
            publish(made, stored())
        with Subscriber(*ends(made)) as early:  # else they may still wait to be sent
            wait_until(lambda: early.ask_again(5) == [5])
        with Subscriber(*ends(made)) as follower:
            seen = subscribed(follower, made, stored())
            assert 0 in follower.missing()
            follower.ask_again(0)
            assert not follower.missing()
            assert max(follower.batches) >= seen
            assert follower.batches[0].events == [AllBlocksCleared()]
            assert follower.ask_again(3)[0] == 3


def test_a_replay_of_nothing_ends_at_once_and_a_wrong_request_harms_nobody():
    with publisher() as made:
        made.observe(SPEC, {})
        with Subscriber(*ends(made)) as follower:
            assert follower.ask_again(10**6) == []
            rude = follower.context.socket(zmq.DEALER)
            rude.connect(ends(made)[1])
            for frames in ((b"what?",), (b"", b"123"), (b"", b"12345678", b"more"), (b"",)):
                rude.send_multipart(frames)
            rude.send_multipart((b"", bytes(8)))
            assert rude.recv_multipart()[2] == bytes(8), "a wrong request was answered"
            assert follower.ask_again(0) == [0]


def test_what_can_be_sent_again_is_bounded():
    with publisher(kept_batches=4) as made:
        made.observe(SPEC, {})
        for _ in range(9):
            publish(made, stored())
        with Subscriber(*ends(made)) as follower:
            assert follower.ask_again(0) == [6, 7, 8, 9]
            assert follower.missing() == [0, 1, 2, 3, 4, 5]


def test_what_can_be_sent_again_is_bounded_in_bytes():
    with publisher(kept_bytes=2 * len(Encoder(SPEC).encode([stored()], 1.0)) + 1) as made:
        made.observe(SPEC, {})
        for _ in range(9):
            publish(made, stored())
        with Subscriber(*ends(made)) as follower:
            assert follower.ask_again(0) == [8, 9]


def test_a_long_replay_to_a_slow_follower_is_whole():
    """Longer than ZeroMQ's own queue of a thousand messages, and than what the kernel holds."""
    large = PagesRemoved(Medium.DEVICE, GroupId(0), keys_for(tokens=np.zeros(8000, np.int32)))
    with publisher() as made:
        made.observe(SPEC, {})
        for _ in range(2500):
            publish(made, large)
        with Subscriber(*ends(made)) as follower:
            wait_until(lambda: made.stats().newest_kept == 2500)
            assert follower.ask_again(0, sleep_s=1.0) == list(range(2501))


class Held:
    """An encoder that waits, as a thread does that gets no time."""

    def __init__(self, spec):
        self._real = Encoder(spec)
        self.go = threading.Event()
        self.asked = threading.Event()
        Held.last = self

    def encode(self, events, wall_s):
        self.asked.set()
        assert self.go.wait(PATIENCE_S)
        return self._real.encode(events, wall_s)


def test_a_full_queue_loses_batches_counts_them_and_leaves_a_gap(monkeypatch):
    monkeypatch.setattr("stratakv.serve.kv_events.Encoder", Held)
    lost = []
    with publisher(on_dropped=lambda: lost.append(1), queue_batches=3) as made:
        made.observe(SPEC, {})
        assert Held.last.asked.wait(PATIENCE_S)  # batch 0 is taken from the queue and held
        for _ in range(10):
            publish(made, AllCleared())
        assert not Held.last.go.is_set()  # who waited for the queue would wait for ever
        assert len(lost) == 7
        Held.last.go.set()
        with Subscriber(*ends(made)) as follower:
            wait_until(lambda: (made.stats().queued, made.stats().kept) == (0, 4))
            publish(made, stored())
            wait_until(lambda: made.stats().kept == 5)
            assert follower.ask_again(0) == [0, 1, 2, 3, 11]
            assert follower.missing() == list(range(4, 11))


def test_neither_an_absent_nor_a_slow_follower_holds_a_step_up():
    with publisher(kept_batches=10) as made:
        made.observe(SPEC, {})
        with Subscriber(*ends(made)) as sleeper:
            sleeper.sub.setsockopt(zmq.RCVHWM, 1)
            subscribed(sleeper, made, AllCleared())
            for _ in range(3000):  # nobody reads: who waited for the follower would wait for ever
                publish(made, stored())
            wait_until(lambda: not made.stats().queued)  # the thread waits for nobody


def test_what_is_queued_at_the_end_is_still_sent(monkeypatch):
    with publisher() as made:
        made.observe(SPEC, {})
        wait_until(lambda: made.stats().kept)
        with monkeypatch.context() as deaf:  # nobody rings the thread's bell
            deaf.setattr(socket.socket, "send", refuses)
            for _ in range(5):
                publish(made, stored())
        made.close()
        assert not made.stats().running
        assert (made.stats().kept, made.stats().newest_kept) == (6, 5)
        made.step_done()  # a last word after the end harms nobody
        publish(made, stored())


def test_the_end_waits_for_a_follower_that_is_behind():
    large = PagesRemoved(Medium.DEVICE, GroupId(0), keys_for(tokens=np.zeros(8000, np.int32)))
    with publisher() as made:
        made.observe(SPEC, {})
        with Subscriber(*ends(made)) as follower:
            subscribed(follower, made, AllCleared())
            for _ in range(600):
                publish(made, large)
            last = made.stats().batches - 1
            ending = threading.Thread(target=made.close)
            ending.start()
            wait_until(lambda: made.stats().kept == last + 1)
            drain(follower, last)
            ending.join()
            assert max(follower.batches) == last


def test_an_endpoint_that_is_taken_is_refused_by_its_flag():
    with publisher() as made:
        pub, replay = ends(made)
        port = replay.rpartition(":")[2]
        with pytest.raises(
            ConfigError, match=r"--kv-events-replay tcp://127.*cannot be bound: Add"
        ):
            KvEventPublisher(KvEventsOptions(endpoint=pub, replay=replay), ManualClock())
        with pytest.raises(ConfigError, match=rf"--kv-events tcp://\*:{port} cannot be bound"):
            KvEventPublisher(KvEventsOptions(endpoint=f"tcp://*:{port}"), ManualClock())


@pytest.mark.parametrize(
    ("endpoint", "line"),
    [
        ("tcp://127.0.0.1:*", r"bound to tcp://127.0.0.1:\d+; subscribers connect to it"),
        ("tcp://127.0.0.1:5601", r"connected to tcp://127.0.0.1:5601, .* bound; tcp://\*:5601 .*"),
    ],
)
def test_the_log_has_whether_an_endpoint_is_bound_or_connected(endpoint, line, caplog):
    caplog.set_level("INFO", "stratakv.serve.kv_events")
    with publisher(endpoint=endpoint, replay=None):
        (logged,) = caplog.messages
    assert re.fullmatch(f"KV events: {line}", logged)


def test_an_endpoint_without_a_wildcard_is_connected_to():
    """As when one router collects from many servers."""
    context = zmq.Context()
    router = context.socket(zmq.SUB)
    router.setsockopt_string(zmq.SUBSCRIBE, "")
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        with publisher(endpoint=f"tcp://127.0.0.1:{port}", replay=None) as made:
            made.observe(SPEC, {})
            for _ in range(500):
                publish(made, AllCleared())
                if router.poll(10):
                    break
            assert decode(router.recv_multipart()[2]).events == [AllBlocksCleared()]
    finally:
        context.destroy(linger=0)

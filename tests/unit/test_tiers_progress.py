"""When what has ended becomes state: in a tick, in a wait, before a flush, and at the end."""

import pytest

from stratakv.core.ids import RequestId
from stratakv.spec.retention import KeepWindow
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.specs import small_spec
from stratakv.tiers.progress import FLUSH_PAUSES, PAUSE_POLLS
from stratakv.transfer.copy_plan import Direction
from stratakv.tree.nodes import Tier
from tests.tier_machine import TierMachine
from tests.unit.test_tiers_pools import serve

SPEC = small_spec([KeepWindow(3)], page_tokens=2)
DEVICE, HOST = Tier.DEVICE, Tier.HOST
NO_REQUEST = RequestId("nobody")


class Machine(TierMachine):
    """``naps``: how often a moment was waited for; nothing ends in it unless ``works``."""

    def __init__(self, works=False, **pages):
        super().__init__(SPEC, 0, **({"device": 12, "host": 12} | pages))
        self.naps, self.works, self.called = 0, works, []
        self.cache.progress.after(lambda: self.called.append("any"))
        self.cache.progress.after(lambda: self.called.append("load"), loads=True)

    def work(self, seconds=0.0):
        self.naps += 1
        if getattr(self, "works", True):
            super().work(seconds)

    def on_the_host(self, prompt=1, pages=3):
        keys = serve(self, prompt, pages)
        self.end_copies()
        self.cache.pools.push_out(DEVICE)
        return keys

    def end_copies(self):
        self.cache.progress.tick()
        for way in Direction:
            while self.transfer.queued[way]:
                self.transfer.end(way)
        self.cache.progress.tick()
        self.called.clear()


def test_who_follows_copies_is_called_in_order_and_for_loads_only_when_there_were_some():
    it = Machine()
    keys = it.on_the_host()
    it.cache.progress.tick()
    assert it.called == ["any"]
    serve(it, 2, 3)
    it.cache.progress.tick()
    it.transfer.end(Direction.BACKUP)
    it.called.clear()
    it.cache.progress.tick()
    assert it.called == ["any"], "a backup has ended, and no load"
    lease = it.cache.lease(keys, 3)
    it.cache.copies.submit()
    it.transfer.end(Direction.LOAD)
    it.called.clear()
    it.cache.progress.tick()
    assert it.called == ["any", "load"]
    it.cache.release(lease)
    it.called.clear()
    assert not it.cache.progress.wait()
    assert it.called == ["any", "load"], "a wait looks at everything"


def test_a_tick_gives_out_what_was_begun_and_does_not_wait_for_it():
    it = Machine()
    serve(it, 1, 3)
    assert not it.transfer.queued[Direction.BACKUP]
    it.cache.progress.tick()
    assert len(it.transfer.queued[Direction.BACKUP]) == 1
    assert it.naps == 0
    assert it.cache.progress.busy


def test_a_wait_submits_what_was_begun_and_ends_with_the_first_copy():
    it = Machine(works=True)
    serve(it, 1, 3)
    assert it.cache.progress.wait()
    assert it.naps > 0
    assert it.cache.pools.counters.backup_pages == 5
    assert not it.cache.progress.busy
    assert not it.cache.progress.wait()


def test_a_pause_lasts_until_a_copy_has_ended_or_its_time_is_over():
    it = Machine()
    serve(it, 1, 3)
    it.cache.progress.tick()
    it.cache.progress.pause()
    assert it.naps == PAUSE_POLLS
    it.transfer.end(Direction.BACKUP)
    it.cache.progress.pause()
    assert it.naps == PAUSE_POLLS, "there was something to report"
    assert not it.cache.progress.busy, "and it has become state"


def test_a_pause_ends_with_an_answer_of_storage_and_returns_whose_turn_it_is():
    it = Machine()
    it.attach()
    keys = it.prefix([1] * 3)
    it.cache.storage.prefetcher.start(NO_REQUEST, keys, 7)
    it.hands[0].join()
    it.cache.progress.pause(NO_REQUEST)
    assert it.naps == 0
    assert not it.cache.storage.busy


def test_to_settle_is_to_wait_for_copies_and_storage():
    it = Machine(works=True)
    it.attach()
    serve(it, 1, 3)
    it.cache.progress.settle()
    assert not it.cache.progress.busy
    assert it.cache.storage.persister.counters.stored == 5
    assert len(it.store.snapshot()) == 5


def test_a_flush_is_refused_while_somebody_stands_on_a_page():
    it = Machine(works=True)
    keys = serve(it, 1, 3)
    lease = it.cache.lease(keys, 3)
    assert not it.cache.progress.flush()
    assert it.cache.match(keys, 3).end == 3
    assert it.naps == 0, "and nobody waits for it"
    it.cache.release(lease)
    assert it.cache.progress.flush()
    assert it.cache.match(keys, 3).anchor_end == 0
    assert all(pool.free == pool.total for pool in it.cache.pools.stats())
    assert it.events.take(), "those who follow know"


def test_a_flush_is_refused_while_the_host_is_held():
    it = Machine(works=True)
    keys = serve(it, 1, 3)
    it.cache.progress.settle()
    hold, it.naps = it.cache.hold(keys, 3), 0
    assert not it.cache.progress.flush()
    assert it.naps == 0
    assert it.cache.match(keys, 3).end == 3
    it.cache.release(hold)
    assert it.cache.progress.flush()


def test_a_flush_gives_storage_a_while_and_no_longer():
    it = Machine(works=True)
    it.attach()
    serve(it, 1, 3)
    it.wait_for_copies()
    it.cache.progress.tick()
    assert it.cache.storage.busy
    it.works, it.naps = False, 0
    assert not it.cache.progress.flush()
    assert it.naps == FLUSH_PAUSES * PAUSE_POLLS
    it.works = True
    assert it.cache.progress.flush()
    assert not len(it.cache.tree)


def test_what_is_pushed_out_has_been_saved_first():
    it = Machine(works=True)
    keys = serve(it, 1, 3)
    it.cache.progress.push_out(DEVICE)
    assert it.cache.pools.counters.dropped_dirty_pages == 0
    found = it.cache.match(keys, 3)
    assert (found.device_end, found.end) == (0, 3)
    it.cache.progress.push_out(HOST)
    assert it.cache.match(keys, 3).anchor_end == 0


class BrokenError(Exception):
    """A copy that cannot be waited for."""


@pytest.mark.parametrize("broken", [False, True])
def test_to_close_is_to_wait_for_copies_and_to_let_go_of_storage_whatever_happens(broken):
    it = Machine(works=True)
    it.attach()
    serve(it, 1, 3)

    def fail():
        raise BrokenError

    if broken:
        it.cache.progress.after(fail)
        with pytest.raises(BrokenError):
            it.cache.progress.close(PATIENCE_S)
    else:
        it.cache.progress.close(PATIENCE_S)
        assert it.cache.pools.counters.backup_pages == 5
        assert not it.cache.copies.busy
    assert it.cache.storage.stats(busy=False) is None, "it is attached to none"

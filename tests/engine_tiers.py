"""A tier below another engine's host rows, whose store works when a test lets it. Owns the rows and
the lanes; what is tested is ``connect.chunk_tier``."""

import numpy as np

from stratakv.connect.chunk_tier import ChunkTier
from stratakv.connect.lent_rows import staged
from stratakv.connect.namespace import EngineNamespace
from stratakv.core.clock import ManualClock
from stratakv.core.ids import GroupId
from stratakv.storage.backend import ObjectKey, StoreFormat
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker

ROW, USED, ROWS = 32, 24, 64
NAMESPACE = EngineNamespace.of([b"weights"], {"dtype": "float32"})
FORM = StoreFormat(spec_digest=NAMESPACE.spec_digest, page_bytes=(USED, USED))


def key_of(number, group=0):
    """As an engine names a page: its hash, and its group at the end."""
    return number.to_bytes(8, "big") + bytes([group])


def name_of(key, namespace=NAMESPACE):
    return ObjectKey(namespace.page_key(key[:-1]), GroupId(key[-1]))


class Hand:
    """In place of a thread: works a lane when it is let."""

    def __init__(self, lane):
        self.lane = lane
        self.stuck = False

    def work(self):
        while self.lane.once():
            pass

    def join(self, timeout=None):
        del timeout
        if not self.stuck:
            self.work()

    def is_alive(self):
        return self.stuck


class EngineRows:
    """``tier`` over ``backend``, with rows of its own: row i is filled with i + 1."""

    def __init__(self, backend, patience_s=10.0, **limits):
        self.memory = bytearray(byte for row in range(1, ROWS + 1) for byte in [row] * ROW)
        self.clock = ManualClock()
        self.hands = []
        ends = staged(Backends(backend, backend))
        worker = IoWorker(ends, FORM, IoLimits(**limits), self.clock, self._hand)
        view = memoryview(self.memory)
        self.tier = ChunkTier(
            worker, name_of, view, (ROW, USED), self.clock, patience_s, self._wait
        )

    @property
    def rows(self):
        return np.frombuffer(self.memory, np.uint8).reshape(ROWS, ROW)

    def _wait(self, _):
        """The store works meanwhile; one that hangs does nothing for a second."""
        if any(hand.stuck for hand in self.hands):
            self.clock.advance(1.0)
        else:
            self.work()

    def _hand(self, lane, name):
        del name
        self.hands.append(Hand(lane))
        return self.hands[-1]

    def work(self):
        """The store does all that it is asked."""
        for hand in self.hands:
            hand.work()

    def store(self, keys, rows, job=1):
        self.tier.store(job, keys, rows)
        self.work()
        (report,) = self.tier.take_reports()
        return report

    def load(self, keys, rows, job=2):
        self.tier.load(job, keys, rows)
        self.work()
        (report,) = self.tier.take_reports()
        return report

    def lookup(self, keys, request="r"):
        """As an engine asks: what is not known yet, in the next step again."""
        first = [self.tier.lookup(key, request) for key in keys]
        self.tier.end_step()
        self.work()
        self.tier.end_step()
        return first, [self.tier.lookup(key, request) for key in keys]

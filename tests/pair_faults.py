"""Faults seeded into what hands requests over, each as a patch that simulated pairs must catch.

Owns the patches; a function here is entered as a context. Each lets somebody touch pages that are
another's, or believe what was not said.
"""

from unittest import mock

from stratakv.cache.footprint import TransferPages
from stratakv.disagg.decode_role import DecodeRole
from stratakv.disagg.messages import Attempt
from stratakv.disagg.prefill_role import PrefillRole
from stratakv.engine.hand_off import Transfers
from stratakv.engine.roles import PartSent, TransferFailed
from stratakv.engine.steps import Steps
from tests.fleet_faults import Patch, both


def rows_that_are_read_and_retracted() -> Patch:
    return mock.patch.object(Steps, "_retractable", lambda self: list(self._running.computing))


def rows_that_are_read_and_given_back() -> Patch:
    """When their requests end."""
    return mock.patch.object(Transfers, "touch", lambda self, row: row in self._receiving.values())


def pages_that_are_free_once_they_are_given_up() -> Patch:
    """Decode reports the end of a transfer when it has no use for it any more."""
    real = DecodeRole.left

    def left(self, prompt):
        real(self, prompt)
        self._events.append(TransferFailed(prompt.id, "seeded"))

    return mock.patch.object(DecodeRole, "left", left)


def rows_that_are_written_and_given_back() -> Patch:
    return mock.patch.object(Transfers, "touch", lambda self, row: row in self._sending.values())


def an_arrival_of_another_generation() -> Patch:
    """Decode believes it: an attempt is its session."""
    return both(
        mock.patch.object(Attempt, "__str__", lambda self: self.session),
        both(
            mock.patch.object(Attempt, "__eq__", lambda self, other: self.session == other.session),
            mock.patch.object(Attempt, "__hash__", lambda self: hash(self.session)),
        ),
    )


def a_page_that_counts_as_sent() -> Patch:
    """The one behind those that were."""
    real = TransferPages.part

    def part(self, starts, source):
        return real(self, [start + (start > 0) for start in starts], source)

    return mock.patch.object(TransferPages, "part", part)


def an_end_before_all_writes_have_ended() -> Patch:
    """The first one's is taken for that of all."""
    real = PrefillRole._written

    def written(self, transfer, failure):
        entry = self._writes.get(transfer)
        for other in set() if entry is None else entry.writes - {transfer}:
            del self._writes[other]
            entry.writes.remove(other)
        real(self, transfer, failure)

    return mock.patch.object(PrefillRole, "_written", written)


def a_part_that_is_sent_while_it_is_read() -> Patch:
    real = PrefillRole._parts_sent

    def parts(self):
        for entry in [entry for entry in self._given if entry.writes]:
            del self._given[entry]
            yield PartSent(entry.request)
        yield from real(self)

    return mock.patch.object(PrefillRole, "_parts_sent", parts)

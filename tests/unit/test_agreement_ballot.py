"""The ballot: what a minimum over ranks may say, and what it may not."""

import numpy as np
import pytest

from stratakv.agreement.agreement import Agreement, digest_of
from stratakv.agreement.ballot import FIELDS, FLAGS, LANES, Ballot, Work
from stratakv.agreement.ranks import Alone
from stratakv.core.errors import DivergenceError


def flags(*bits):
    return np.array(bits, np.bool_)


def held(*ballots):
    """What each rank reads after the vote."""
    least = np.minimum.reduce([ballot.lanes for ballot in ballots])
    return [ballot.result(least) for ballot in ballots]


def voted(work, *found):
    ballot = Ballot()
    ballot.cast(work, found)
    return ballot


def test_every_kind_has_its_lanes():
    assert len(FLAGS) == len(Work)
    assert len(Ballot().lanes) == LANES


def test_who_says_nothing_has_ended_nothing():
    for result in held(voted(Work.BACKUP, flags(1), flags(1)), Ballot()):
        assert result.ended(Work.BACKUP) == 0
        assert result.flags(Work.BACKUP) == []


def test_what_ends_is_what_has_ended_everywhere():
    ours = voted(Work.BACKUP, flags(1), flags(1), flags(0))
    theirs = voted(Work.BACKUP, flags(1), flags(0))
    for result in held(ours, theirs):
        assert result.ended(Work.BACKUP) == 2
        assert [bits.tolist() for bits in result.flags(Work.BACKUP)] == [[True], [False]]


def test_usable_ends_are_those_usable_on_every_rank():
    """Rank A can use {5}, B {2, 3}: as lengths their minimum is 3, which A cannot use."""
    ours = voted(Work.QUERY, flags(0, 0, 0, 0, 1))
    theirs = voted(Work.QUERY, flags(0, 1, 1, 0, 0))
    for result in held(ours, theirs):
        assert not result.flags(Work.QUERY)[0].any()


def test_kinds_do_not_mix():
    ballot = voted(Work.QUERY, flags(1, 0, 1))
    ballot.cast(Work.FETCH, [flags(0, 1)])
    ballot.cast(Work.STORE, [flags(1, 1, 1), flags(0, 0)])
    ballot.count(Work.LOAD, 7)
    ballot.digest(FIELDS - 1, 5)
    (result,) = held(ballot)
    assert result.flags(Work.QUERY)[0].tolist() == [True, False, True]
    assert result.flags(Work.FETCH)[0].tolist() == [False, True]
    assert [bits.tolist() for bits in result.flags(Work.STORE)] == [[True] * 3, [False] * 2]
    assert result.ended(Work.LOAD) == 7
    assert result.ended(Work.REMOVE) == 0


def test_what_does_not_fit_waits():
    width = FLAGS[Work.STORE] // 3
    ballot = voted(Work.STORE, *[np.ones(width, np.bool_)] * 4)
    (result,) = held(ballot)
    assert result.ended(Work.STORE) == 3
    assert all(bits.all() for bits in result.flags(Work.STORE))


def test_an_operation_that_could_never_fit_is_a_fault():
    with pytest.raises(AssertionError, match="flags of one STORE"):
        voted(Work.STORE, np.ones(FLAGS[Work.STORE] + 1, np.bool_))


def test_the_shape_does_not_depend_on_what_is_said():
    assert len(voted(Work.QUERY, flags(1)).lanes) == len(Ballot().lanes)


def test_equal_digests_agree_and_others_are_named():
    ours, theirs = Ballot(), Ballot()
    for ballot in (ours, theirs):
        ballot.digest(0, 11)
    ours.digest(1, 4)
    theirs.digest(1, 3)
    for result in held(ours, theirs):
        assert result.differing(2) == 1
        assert result.differing(1) is None


class _Twin:
    """A second rank whose figures are told beforehand."""

    rank, size = 0, 2

    def __init__(self, there):
        self.there = there

    def least(self, lanes):
        other = Ballot()
        for field, figures in enumerate(self.there):
            other.digest(field, digest_of(figures))
        return np.minimum(lanes, other.lanes)

    def gather(self, text):
        return [text, repr(self.there[-1])]


def test_a_difference_names_the_field_and_shows_both_sides():
    agreement = Agreement(_Twin([(1, 2), (7, (3, 4))]))
    agreement.watch("the tree", lambda: (1, 2))
    agreement.watch("free pages", lambda: (7, (3, 5)))
    with pytest.raises(DivergenceError) as found:
        agreement.agree(Ballot())
    said = str(found.value)
    assert "free pages" in said
    assert "(7, (3, 5))" in said
    assert "(7, (3, 4))" in said


def test_ranks_that_are_alike_agree():
    agreement = Agreement(_Twin([(1, 2)]))
    agreement.watch("the tree", lambda: (1, 2))
    assert agreement.agree(Ballot()).ended(Work.LOAD) == 0
    assert agreement.ballots == 1


def test_a_rank_alone_agrees_with_itself():
    agreement = Agreement(Alone())
    agreement.watch("the tree", lambda: (1 / 0,))
    assert agreement.agree(voted(Work.BACKUP, flags(1))).ended(Work.BACKUP) == 1
    assert agreement.tell(b"letter") == b"letter"

"""The ballot: what a minimum over ranks may say, and what it may not."""

import numpy as np
import pytest

from stratakv.agreement.agreement import SHOWN, Agreement, digest_of
from stratakv.agreement.ballot import FIELDS, FLAGS, LANES, SLOTS, Ballot, SlotKind, Work
from stratakv.agreement.ranks import SingleRank
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
    assert len(SLOTS) == len(SlotKind)
    assert len(Ballot().lanes) == LANES


def test_a_ballot_costs_a_step_107_kib_whatever_is_reported():
    """Eight digests in two lanes each, a count of each of seven kinds, 9,280 flags, 4,352 slots."""
    assert Ballot().lanes.nbytes == 8 * (16 + 7 + 64 + 4096 + 4096 + 1024 + 4 * 1024 + 256)


def test_one_ballot_ends_a_million_operations_without_flags_at_most():
    ballot = Ballot()
    ballot.count(Work.LOAD, 2**20 + 1)
    ballot.count(Work.TOUCH, 2**20 - 1)
    (result,) = held(ballot)
    assert (result.ended(Work.LOAD), result.ended(Work.TOUCH)) == (2**20, 2**20 - 1)


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


def stream(rank_found, most=1000):
    """What each rank reads of QUERY, where each tells what has ended there, until all is agreed.
    ``rank_found``: by rank, the flags of each operation. Also: how many ballots it took."""
    begun, read = {}, [[] for _ in rank_found]
    ops = len(rank_found[0])
    for ballots in range(1, most):
        votes = []
        for rank, found in enumerate(rank_found):
            ballot = Ballot(begun)
            ballot.cast(Work.QUERY, found[len(read[rank]) :])
            votes.append(ballot)
        results = held(*votes)
        for rank, result in enumerate(results):
            read[rank] += result.flags(Work.QUERY)
            assert result.ended(Work.QUERY) == len(result.flags(Work.QUERY))
        begun = results[0].begun
        if len(read[0]) == ops:
            assert not begun
            return read, ballots
    raise AssertionError("it never ends")


@pytest.mark.parametrize("seed", range(10))
def test_an_operation_of_any_width_is_read_whole_after_some_ballots(seed):
    random = np.random.default_rng(seed)
    room = FLAGS[Work.QUERY]
    widths = random.choice([1, 2, 300, room - 1, room, room + 1, 3 * room + 7], 12)
    ranks = [[random.random(width) < 0.7 for width in widths] for _ in range(3)]
    read, ballots = stream(ranks)
    for status in read:
        for at, flags in enumerate(status):
            assert (flags == np.logical_and.reduce([rank[at] for rank in ranks])).all()
    assert ballots == -(-sum(widths) // room)


def test_a_rank_that_comes_later_holds_up_only_what_it_has_not_ended():
    room = FLAGS[Work.QUERY]
    wide, ours = np.ones(room + 10, np.bool_), Ballot()
    ours.cast(Work.QUERY, [flags(1), wide])
    theirs = Ballot()
    theirs.cast(Work.QUERY, [flags(1)])
    (mine, its) = held(ours, theirs)
    assert mine.ended(Work.QUERY) == its.ended(Work.QUERY) == 1
    assert not mine.begun
    assert not its.begun
    again = voted(Work.QUERY, wide)
    (begun,) = held(again)
    assert begun.ended(Work.QUERY) == 0
    assert len(begun.begun[Work.QUERY]) == room
    (silent,) = held(Ballot(begun.begun))
    assert len(silent.begun[Work.QUERY]) == room, "a ballot about something else forgets nothing"


def numbers(*votes):
    return np.array(votes, np.int64)


def test_of_each_slot_the_least_counts_and_kinds_do_not_mix():
    ours, theirs = voted(Work.STORE, flags(1)), voted(Work.STORE, flags(1))
    ours.vote(SlotKind.SESSION, numbers(4, 0, 3, 2))
    theirs.vote(SlotKind.SESSION, numbers(3, 4, 3, 4))
    ours.vote(SlotKind.LINK, numbers(*(1 for _ in range(SLOTS[SlotKind.LINK]))))
    theirs.vote(SlotKind.LINK, numbers(1, 0, *(1 for _ in range(SLOTS[SlotKind.LINK] - 2))))
    for result in held(ours, theirs):
        assert result.least(SlotKind.SESSION)[:5].tolist() == [3, 0, 3, 2, 0]
        assert len(result.least(SlotKind.SESSION)) == SLOTS[SlotKind.SESSION]
        least = result.least(SlotKind.LINK).tolist()
        assert least == [1, 0, *(1 for _ in range(SLOTS[SlotKind.LINK] - 2))]
        assert result.flags(Work.STORE)[0].tolist() == [True]


def test_there_are_so_many_slots_and_no_more():
    with pytest.raises(AssertionError, match="257 slots of LINK"):
        Ballot().vote(SlotKind.LINK, numbers(*range(257)))


class Voice:
    """Votes for one number, and keeps what was agreed."""

    def __init__(self, number):
        self.number, self.least, self.order = number, [], []

    def vote(self, ballot):
        self.order.append("vote")
        ballot.vote(SlotKind.SESSION, numbers(self.number))

    def agreed(self, result):
        self.order.append("agreed")
        self.least.append(result.least(SlotKind.SESSION).item(0))


def test_who_is_included_votes_in_every_ballot_and_gets_its_result():
    agreement, voice = Agreement(SingleRank()), Voice(3)
    agreement.include(voice)
    for _ in range(2):
        agreement.agree(agreement.ballot())
    assert voice.least == [3, 3]
    assert voice.order == ["vote", "agreed"] * 2


def test_an_operation_without_flags_of_a_kind_that_has_them_is_a_fault():
    """It would end everywhere as soon as it ends anywhere."""
    with pytest.raises(AssertionError, match="no flags of one STORE"):
        voted(Work.STORE, flags())


def test_the_shape_does_not_depend_on_what_is_reported():
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


@pytest.mark.parametrize("apart", [*range(FIELDS), None])
def test_of_all_fields_the_one_that_differs_is_found(apart):
    ours, theirs = Ballot(), Ballot()
    for field in range(FIELDS):
        ours.digest(field, 100 + field)
        theirs.digest(field, 100 + field + (field == apart))
    for result in held(ours, theirs):
        assert result.differing(FIELDS) == apart


class _Twin:
    """A second rank whose figures are told beforehand, by field, and what it says of the last."""

    rank, size = 0, 2

    def __init__(self, there, description=""):
        self.there = there
        self.description = description
        self.order = []

    def all_reduce_min(self, lanes, meanwhile):
        self.order.append("said")
        meanwhile()
        self.order.append("heard")
        other = Ballot()
        for field, figures in enumerate(self.there):
            other.digest(field, digest_of(figures))
        return np.minimum(lanes, other.lanes)

    def gather(self, text):
        return [text, self.description]


def nodes(count, idle):
    return {"nodes": count, "to evict": idle}


def test_a_difference_names_the_field_and_shows_both_sides():
    there = [nodes(1, 2), {"on device": 3, "on host": 4, "on disk": 6}]
    agreement = Agreement(_Twin(there, "on device 3\non host 4\non disk 6"))
    agreement.watch("the tree", lambda: nodes(1, 2))
    agreement.watch("free pages", lambda: {"on device": 3, "on host": 5, "on disk": 6})
    with pytest.raises(DivergenceError) as found:
        agreement.agree(Ballot())
    assert str(found.value) == (
        "after 1 ballots ranks differ in free pages: rank 0 has on host 5; rank 1 has on host 4"
    )


def test_a_digest_has_62_bits_and_so_has_its_opposite_a_lane():
    digests = [digest_of({"nodes": at}) for at in range(100)]
    assert len(set(digests)) == len(digests)
    assert 0 <= min(digests) <= max(digests) < 2**62
    assert max(digests) >= 2**61
    ballot = Ballot()
    ballot.digest(1, max(digests))
    assert ballot.lanes[:4].tolist() == [0, 0, max(digests), -max(digests)]
    assert np.bitwise_or.reduce(digests) == 2**62 - 1, "no bit is masked away"


def test_a_difference_in_sums_is_reported_in_the_words_of_what_was_summed_and_not_at_length():
    theirs = "\n".join(f"cell {at} is {at}" for at in range(100))
    agreement = Agreement(_Twin([{"sum": 8}], theirs))
    description = (f"cell {at} is {at + (at > 50)}" for at in range(99))
    agreement.watch("cells", lambda: {"sum": 7}, lambda: description)
    with pytest.raises(DivergenceError) as found:
        agreement.agree(Ballot())
    message = str(found.value)
    assert "rank 0 has cell 51 is 52, cell 52 is 53, " in message
    assert "rank 1 has cell 51 is 51, cell 52 is 52, " in message
    assert message.count(" and 41 more") == 2, "of 49 lines 8 are shown"
    assert message.count(" is ") == 2 * 8


def test_ranks_that_are_alike_agree():
    agreement = Agreement(_Twin([nodes(1, 2)]))
    agreement.watch("the tree", lambda: nodes(1, 2))
    assert agreement.agree(Ballot()).ended(Work.LOAD) == 0
    assert agreement.ballots == 1


def test_what_is_to_be_done_in_any_case_is_done_while_others_vote():
    twin = _Twin([])
    Agreement(twin).agree(Ballot(), lambda: twin.order.append("done"))
    assert twin.order == ["said", "done", "heard"]
    done = []
    Agreement(SingleRank()).agree(Ballot(), lambda: done.append(1))
    assert done == [1]


def test_a_rank_alone_agrees_with_itself():
    agreement = Agreement(SingleRank())
    agreement.watch("the tree", lambda: {"nodes": 1 // 0})
    assert agreement.agree(voted(Work.BACKUP, flags(1))).ended(Work.BACKUP) == 1
    assert agreement.broadcast(b"message") == b"message"


def test_a_difference_of_just_as_many_lines_as_are_shown_is_reported_whole():
    theirs = "\n".join(f"cell {at} is {at}" for at in range(SHOWN))
    agreement = Agreement(_Twin([{"sum": 8}], theirs))
    agreement.watch("cells", lambda: {"sum": 7}, lambda: [f"cell {at}" for at in range(SHOWN)])
    with pytest.raises(DivergenceError) as found:
        agreement.agree(Ballot())
    assert " more" not in str(found.value)
    assert f"cell {SHOWN - 1} is {SHOWN - 1}" in str(found.value)


def test_only_the_first_rank_leads_and_collectives_are_counted():
    class Second(SingleRank):
        rank = 1

    agreement = Agreement(SingleRank())
    assert agreement.leads
    assert not Agreement(Second()).leads
    for _ in range(3):
        agreement.agree(Ballot())
        agreement.broadcast(b"message")
    assert (agreement.ballots, agreement.broadcasts) == (3, 3)


def test_what_one_rank_has_and_the_other_lacks_is_reported_as_nothing():
    agreement = Agreement(_Twin([{"sum": 8}], "cell 0 is 1"))
    agreement.watch("cells", lambda: {"sum": 7}, lambda: ["cell 0 is 1", "cell 1 is 2"])
    with pytest.raises(DivergenceError, match=r"rank 0 has cell 1 is 2; rank 1 has nothing$"):
        agreement.agree(Ballot())


def test_there_is_a_lane_for_so_many_fields_and_no_more():
    agreement = Agreement(SingleRank())
    for field in range(FIELDS):
        agreement.watch(f"field {field}", dict)
    with pytest.raises(AssertionError, match="no lane for one more"):
        agreement.watch("one more", dict)


def test_who_has_parted_agrees_with_itself():
    agreement = Agreement(_Twin([nodes(1, 2)], "there"))
    agreement.watch("the tree", lambda: nodes(1, 3))
    assert agreement.gather("here") == ["here", "there"]
    agreement.part()
    assert agreement.agree(Ballot()).ended(Work.LOAD) == 0
    assert agreement.gather("here") == ["here"]


def test_a_group_of_one_does_meanwhile_what_is_to_be_done():
    done, lanes = [], Ballot().lanes
    assert SingleRank().all_reduce_min(lanes, lambda: done.append(1)) is lanes
    assert done == [1]

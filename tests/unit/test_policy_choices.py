"""Checkpoint ends, load-back and write choices: plain arithmetic, case by case."""

from itertools import pairwise

import numpy as np
import pytest

from stratakv.policy.checkpoints import (
    CheckpointPolicy,
    checkpoint_ends,
    last_end,
    worth_keeping,
)
from stratakv.policy.load_back import LoadBack, LoadBackPolicy
from stratakv.policy.prefetch_pace import PrefetchPolicy, Timeout
from stratakv.policy.write import (
    NoBackup,
    WriteBack,
    WriteThrough,
    WriteThroughSelective,
    safe_wanted,
    to_clean,
    weighs_uses,
    worth_backup,
)


@pytest.mark.parametrize(
    ("tokens", "page", "end"),
    [
        (0, 16, 0),
        (1, 16, 0),
        (16, 16, 0),
        (17, 16, 1),
        (32, 16, 1),
        (33, 16, 2),
        (5, 1, 4),
        (1, 1, 0),
        (0, 1, 0),
    ],
)
def test_the_last_end_leaves_one_token_to_compute(tokens, page, end):
    assert last_end(tokens, page) == end


def test_a_new_prompt_has_one_checkpoint():
    assert checkpoint_ends(100, 0, 0, 16) == (6,)
    assert checkpoint_ends(96, 0, 0, 16) == (5,)  # floorP(n - 1): exactly six pages


def test_a_branching_point_lies_where_only_the_anchor_went_on():
    assert checkpoint_ends(100, 2, 4, 16) == (4, 6)
    assert checkpoint_ends(100, 4, 4, 16) == (6,)
    # An anchor that matches beyond the prompt's own last end adds nothing.
    assert checkpoint_ends(96, 0, 6, 16) == (5,)


def test_what_is_usable_already_is_no_new_checkpoint():
    assert checkpoint_ends(100, 6, 6, 16) == ()
    assert checkpoint_ends(10, 0, 0, 16) == ()


def test_milestones_lie_at_distances_that_double_from_both_ends():
    assert worth_keeping(range(1, 24), 24, 1) == [1, 2, 3, 6, 12, 18, 21]
    assert worth_keeping(range(1, 64), 64, 1) == [1, 2, 4, 8, 16, 32, 48, 56]
    assert worth_keeping(range(16, 512, 16), 512, 16) == [16, 32, 64, 128, 256, 384, 448]
    assert worth_keeping(range(1, 2), 2, 1) == [1]
    assert worth_keeping([], 9, 1) == []


@pytest.mark.parametrize("last", [2, 3, 17, 100, 1023, 5000])
def test_a_branch_anywhere_loses_a_constant_factor(last):
    kept = [0, *worth_keeping(range(1, last), last, 1)]
    assert len(kept) <= 4 + last.bit_length()
    for branch in range(1, last):
        hit = max(end for end in kept if end <= branch)
        lost = branch - hit
        assert lost <= (branch + lost) / 2
        assert lost <= max(1, last / 8, last - branch)


def test_a_prefix_that_grows_page_by_page_keeps_a_few():
    """From what is left of it alone: as good as if all had been there to choose from, or nearly."""
    kept: list[int] = []
    for last in range(2, 2000):
        kept = worth_keeping([*kept, last - 1], last, 1)
    assert len(kept) <= 20
    ends = [0, *kept, 1999]
    assert all(below - above <= max(1, below / 2) for above, below in pairwise(ends))
    assert all(below - above <= 2000 / 4 for above, below in pairwise(ends))


def test_milestones_of_a_prompt_are_those_that_it_computes():
    policy = CheckpointPolicy(page_tokens=16, snapshot_pages=2, unit=1)
    assert policy.milestones(400, 0) == [1, 2, 3, 6, 12, 18, 21]
    assert policy.milestones(400, 6) == [12, 18, 21]
    assert policy.milestones(16, 0) == policy.milestones(1, 0) == []
    assert policy.superfluous([1, 2, 3, 6, 12, 18, 21], 40) == [18]


def test_a_load_below_the_threshold_is_declined():
    policy = LoadBackPolicy(threshold_tokens=32, budget_tokens=100)
    assert policy.decide(31, 0) is LoadBack.DECLINE
    assert policy.decide(32, 0) is LoadBack.LOAD
    assert LoadBackPolicy(threshold_tokens=0).decide(0, 0) is LoadBack.DECLINE
    assert LoadBackPolicy(threshold_tokens=0).decide(1, 0) is LoadBack.LOAD


def test_a_load_over_the_budget_waits_unless_it_is_alone():
    policy = LoadBackPolicy(threshold_tokens=10, budget_tokens=100)
    assert policy.decide(60, 40) is LoadBack.LOAD
    assert policy.decide(61, 40) is LoadBack.WAIT
    assert policy.decide(500, 1) is LoadBack.WAIT
    assert policy.decide(500, 0) is LoadBack.LOAD
    assert policy.decide(9, 100) is LoadBack.DECLINE
    assert LoadBackPolicy(threshold_tokens=1, budget_tokens=1).decide(1, 1) is LoadBack.WAIT


@pytest.mark.parametrize("fields", [{"threshold_tokens": -1}, {"budget_tokens": 0}])
def test_a_load_back_policy_out_of_range_names_its_field(fields):
    with pytest.raises(ValueError, match=f"{next(iter(fields))} .*allowed is"):
        LoadBackPolicy(**fields)


def test_write_through_backs_up_everything_and_no_backup_nothing():
    hits = np.array([0, 1, 5], np.int32)
    assert worth_backup(WriteThrough(), hits).tolist() == [True] * 3
    assert worth_backup(NoBackup(), hits).tolist() == [False] * 3


@pytest.mark.parametrize(("uses", "worth"), [(1, [1, 1, 1]), (2, [0, 1, 1]), (6, [0, 0, 1])])
def test_write_through_selective_counts_the_request_that_computed_a_page(uses, worth):
    hits = np.array([0, 1, 5], np.int32)
    assert worth_backup(WriteThroughSelective(uses), hits).tolist() == [bool(w) for w in worth]


def test_write_back_backs_nothing_up_when_it_is_offered():
    assert not worth_backup(WriteBack(), np.array([0, 1, 5], np.int32)).any()


def test_only_the_selective_policy_looks_again_when_a_page_is_used():
    policies = (WriteThrough(), WriteThroughSelective(), WriteBack(), NoBackup())
    assert [weighs_uses(policy) for policy in policies] == [False, True, False, False]


def test_only_write_back_wants_a_reserve():
    for policy in (WriteThrough(), WriteThroughSelective(), NoBackup()):
        assert safe_wanted(policy, 1000) == 0
    assert safe_wanted(WriteBack(0.1), 101) == 11
    assert safe_wanted(WriteBack(1.0), 7) == 7


def test_a_cleaner_starts_below_the_reserve_and_does_a_quarter_more():
    assert to_clean(100, 100) == 0
    assert to_clean(100, 99) == 26
    assert to_clean(100, 0) == 125
    assert to_clean(0, 0) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WriteThroughSelective(0), "hits 0"),
        (lambda: WriteBack(0.0), "reserve 0.0"),
        (lambda: WriteBack(1.5), "reserve 1.5"),
        (lambda: WriteBack(float("nan")), "reserve nan"),
    ],
)
def test_a_write_policy_out_of_range_names_its_field(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_usual_where_nothing_is_given():
    assert LoadBackPolicy() == LoadBackPolicy(threshold_tokens=10, budget_tokens=65536)
    assert WriteThroughSelective() == WriteThroughSelective(2)
    assert WriteBack() == WriteBack(0.1)
    assert PrefetchPolicy(threshold_tokens=1, budget_tokens=1).stop == Timeout()
    assert Timeout().most_s == 30

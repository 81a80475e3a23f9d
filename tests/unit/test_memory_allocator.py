import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stratakv.memory.allocator import PageAllocator


def ids(*pages):
    return np.array(pages, np.int32)


def test_alloc_hands_out_every_page_once_and_page_zero_is_nothing_special():
    allocator = PageAllocator(5)
    pages = allocator.alloc(5)
    assert pages is not None
    assert pages.dtype == np.int32
    assert sorted(pages) == [0, 1, 2, 3, 4]
    assert allocator.available() == 0


def test_alloc_is_all_or_nothing():
    allocator = PageAllocator(4)
    assert allocator.alloc(5) is None
    assert allocator.available() == 4
    assert allocator.alloc(4) is not None
    assert allocator.alloc(1) is None


def test_alloc_of_nothing_succeeds_even_when_full():
    allocator = PageAllocator(0)
    pages = allocator.alloc(0)
    assert pages is not None
    assert len(pages) == 0
    allocator.free(pages)


def test_pages_are_owned_copies():
    allocator = PageAllocator(4)
    first = allocator.alloc(2)
    assert first is not None
    kept = first.copy()
    first[:] = 3
    second = allocator.alloc(2)
    assert second is not None
    assert sorted([*kept, *second]) == [0, 1, 2, 3]
    allocator.free(kept)
    third = allocator.alloc(2)
    assert sorted([*third, *second]) == [0, 1, 2, 3]


@pytest.mark.parametrize("pages", [ids(0), ids(1, 2, 2), ids(-1), ids(8), ids(1, 8)])
def test_a_bad_free_is_caught_and_changes_nothing(pages):
    allocator = PageAllocator(8)
    taken = allocator.alloc(8)
    allocator.free(ids(0))
    with pytest.raises(AssertionError):
        allocator.free(pages)
    assert allocator.available() == 1
    allocator.free(taken[taken != 0])
    assert allocator.available() == 8


def test_a_free_of_what_was_never_allocated_is_caught():
    with pytest.raises(AssertionError, match="double free"):
        PageAllocator(8).free(ids(3))


class AllocatorMachine(RuleBasedStateMachine):
    """Against a set: ids are distinct, in range, and available() is exact."""

    capacity = 12

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(self.capacity)
        self.used = set()

    @rule(n=st.integers(0, 14))
    def alloc(self, n):
        pages = self.allocator.alloc(n)
        if n > self.capacity - len(self.used):
            assert pages is None
            return
        fresh = set(pages.tolist())
        assert len(fresh) == n
        assert fresh <= set(range(self.capacity)) - self.used
        self.used |= fresh

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.used)), unique=True))
        self.allocator.free(ids(*pages))
        self.used -= set(pages)

    @rule(pages=st.lists(st.integers(-2, 13), min_size=1, max_size=6))
    def free_anything(self, pages):
        if len(set(pages)) == len(pages) and set(pages) <= self.used:
            self.allocator.free(ids(*pages))
            self.used -= set(pages)
        else:
            with pytest.raises(AssertionError):
                self.allocator.free(ids(*pages))

    @invariant()
    def counts_agree(self):
        assert self.allocator.available() == self.capacity - len(self.used)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(20)))
def test_freeing_in_any_order_gives_every_page_back(order):
    allocator = PageAllocator(20)
    allocator.alloc(20)
    for at in range(0, 20, 4):
        allocator.free(ids(*order[at : at + 4]))
    assert sorted(allocator.alloc(20)) == list(range(20))

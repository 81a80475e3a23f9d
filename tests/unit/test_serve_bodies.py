"""How much memory the bodies of all clients have together, and how much one leaves for others."""

from contextlib import ExitStack

import pytest

from stratakv.serve.bodies import SMALL_BYTES, BodyMemory

MOST = 12 * SMALL_BYTES


@pytest.fixture
def all_of_them():
    with ExitStack() as stack:
        yield stack


def holds(memory, stack, client, sizes):
    return [stack.enter_context(memory.share(client))(size) for size in sizes]


def test_one_client_gets_half_and_leaves_half(all_of_them):
    memory, size = BodyMemory(MOST), 2 * SMALL_BYTES
    assert holds(memory, all_of_them, "a", [size] * 4) == [True, True, True, False]
    assert holds(memory, all_of_them, "b", [size] * 2) == [True, False]
    assert holds(memory, all_of_them, "c", [size, SMALL_BYTES + 1]) == [True, False]
    assert memory.held_bytes == 5 * size


def test_what_was_held_is_given_back_however_a_body_ends():
    memory = BodyMemory(MOST)

    def broken():
        with memory.share("a") as hold:
            assert hold(MOST // 2)
            assert not hold(MOST // 2 + 1)
            assert memory.held_bytes == 0
            assert hold(MOST // 4)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert memory.held_bytes == 0
    assert not memory._of_client


def test_a_body_that_grows_counts_once(all_of_them):
    memory = BodyMemory(MOST)
    hold = all_of_them.enter_context(memory.share("a"))
    assert [hold(size) for size in range(0, MOST // 2, 999)] == [True] * len(
        range(0, MOST // 2, 999)
    )


def test_small_bodies_are_taken_whatever_is_held(all_of_them):
    memory = BodyMemory(0)
    assert holds(memory, all_of_them, "a", [SMALL_BYTES, SMALL_BYTES + 1]) == [True, False]
    assert memory.held_bytes == 0

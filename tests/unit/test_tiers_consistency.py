"""What ranks compare covers all arrays that a cache decides by."""

import re
from collections import deque
from enum import Enum

import numpy as np
import pytest

from stratakv.agreement.scrubber import Scrubber
from stratakv.assembly.build import Sockets
from stratakv.assembly.rank_context import RankContext
from stratakv.core.errors import DivergenceError
from stratakv.core.ids import TicketId
from stratakv.tiers.consistency import tables_of
from tests.engines import greedy, run, token_engine
from tests.unit.test_cache_copies import CONFIG, PROMPTS, SPEC, engine

LEFT_OUT = re.compile(
    r"_used|_position"  # of an allocator: what its stack says, and scratch
    r"|_matcher\._starts|_rules\.ends\._tables"  # of rules: never change
    r"|nodes\._runs|nodes\._depths"  # chains, as the parents say; numbers from 0 on
    r"|_transfer\."  # addresses
    r"|queues"  # batches: from ranks that are compared
    r"|left_s|\.misses\."  # when pages left, for why-miss: nothing is decided by it
    r"|_seated"  # what the tables say
    r"|_candidates\."  # what the leases say, which SpillCandidates.check compares
)


def arrays(thing, path="cache", seen=None):
    """Every array that a thing reaches, with its path."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, Enum | type):
        return
    seen.add(id(thing))
    match thing:
        case np.ndarray():
            yield path, thing
        case dict():
            parts = thing.items()
        case list() | tuple() | deque():
            parts = enumerate(thing)
        case _:
            kinds = type(thing).__mro__
            names = {name for kind in kinds for name in getattr(kind, "__slots__", ())}
            found = {name: getattr(thing, name) for name in names if hasattr(thing, name)}
            parts = (found | getattr(thing, "__dict__", {})).items()
    if not isinstance(thing, np.ndarray):
        for name, part in parts:
            yield from arrays(part, f"{path}.{name}", seen)


def address(array):
    return array.__array_interface__["data"][0]


def compared(cache):
    return list(tables_of(cache.tiers.tree, cache.tiers.pools, cache.beside))


def test_no_array_of_a_cache_is_left_out():
    with engine() as parts:
        run(parts, greedy("a", PROMPTS[0], 3))
        cache = parts.cache
        tables = compared(cache)
        places = {address(table.cells) for table in tables}
        assert len({table.name for table in tables}) == len(tables) == len(places)
        seen = [(path, array) for path, array in arrays(cache) if address(array) in places]
        assert len({address(array) for _, array in seen}) == len(tables)
        lone = [path for path, array in arrays(cache) if address(array) not in places]
        assert not [path for path in lone if not LEFT_OUT.search(path)]


def spoil_a_rank(cache):
    cache.tiers.tree.internals.nodes.rank[1][5] += 1


def spoil_a_pin(cache):
    cache.tiers.tree.internals.nodes.pins[1][0][3] += 1


def spoil_a_demand(cache):
    cache._sequences._left[1][2] += 1


def spoil_the_last_place_of_a_pool(cache):
    cache.tiers.pools.tiers[1][1].stack[0] -= 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_a_rank, "rank of group 1[5]"),
        (spoil_a_pin, "pins on host of group 0[3]"),
        (spoil_a_demand, "booked of group 1[2]"),
        (spoil_the_last_place_of_a_pool, "free place of g1 on host[0]"),
    ],
)
def test_what_counts_do_not_show_is_found_within_a_round_and_named(spoil, message):
    with engine() as ours, engine() as theirs:
        for parts in (ours, theirs):
            run(parts, greedy("a", PROMPTS[0], 3))
        caches = [parts.cache for parts in (ours, theirs)]
        scrubbers = [Scrubber(compared(cache)) for cache in caches]
        assert rounds(scrubbers) == []
        spoil(caches[1])
        (lines,) = rounds(scrubbers)
        ((mine, its),) = [pair for pair in zip(*lines, strict=True) if pair[0] != pair[1]]
        assert mine.startswith(message)
        assert its.startswith(message)


def rounds(scrubbers):
    """What both tell of the pieces in which they differ, in a round."""
    found = []
    for _ in range(len(scrubbers[0])):
        one, other = (scrubber.figures() for scrubber in scrubbers)
        if one != other:
            found.append([scrubber.description() for scrubber in scrubbers])
    return found


class Twin:
    """A second rank: has what this one has, or, once it is ``late``, what this one had at the last
    ballot but one, and says so."""

    rank, size = 0, 2

    def __init__(self):
        self.late, self.before = False, None

    def broadcast(self, message):
        return message

    def all_reduce_min(self, lanes, meanwhile=lambda: None):
        meanwhile()
        if not self.late:
            return lanes.copy()
        before, self.before = self.before, lanes.copy()
        return lanes if before is None else np.minimum(lanes, before)

    def gather(self, text):
        return [text, "something else"]


def take_a_page(cache):
    cache.tiers.pools.tiers[0][1].alloc(1)


def swap_free_pages(cache):
    following = cache.tiers.pools.tiers[1][1].next(2)
    following[:] = following[::-1].copy()


def forget_a_count(cache):
    cache.tiers.tree.internals.pins.evictable[0][1] -= 1


def lose_a_copy(cache):
    cache.tiers.copies._failed.add(TicketId(99))


def miss_a_step(cache):
    cache.storage._store.count_step()


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (take_a_page, "free pages"),
        (swap_free_pages, "free pages"),
        (forget_a_count, "the tree"),
        (lose_a_copy, "copies"),
        (miss_a_step, "storage"),
    ],
)
def test_a_difference_shows_in_the_same_ballot_under_its_name(spoil, field, monkeypatch):
    monkeypatch.setattr(Scrubber, "figures", lambda _: {"piece": 0})  # its round would be the same
    twin = Twin()
    context = RankContext.of(twin)
    agreement = context.agreement
    with token_engine(SPEC, CONFIG, (60, 30), (60, 30), sockets=Sockets(ranks=context)) as parts:
        cache = parts.cache
        run(parts, greedy("a", PROMPTS[0], 3))
        twin.late = True
        for _ in range(2):
            agreement.agree(agreement.ballot())
        spoil(cache)
        with pytest.raises(DivergenceError, match=f"ranks differ in {field}: rank 0 has "):
            agreement.agree(agreement.ballot())

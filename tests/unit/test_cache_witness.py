"""What ranks compare covers all arrays that a cache decides by."""

import re
from collections import deque
from enum import Enum

import numpy as np

from stratakv.cache.witness import tables_of
from tests.engines import greedy, run
from tests.unit.test_cache_copies import PROMPTS, engine

LEFT_OUT = re.compile(
    r"_used|_position"  # of an allocator: what its stack says, and scratch
    r"|_matcher\._starts|_rules\.ends\._tables"  # of rules: never change
    r"|nodes\.kids\.|nodes\._runs"  # views; chains, as the parents say
    r"|_transfer\."  # addresses
    r"|queues"  # batches: from ranks that are compared
    r"|_seated"  # what the tables say
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


def test_no_array_of_a_cache_is_left_out():
    with engine() as parts:
        run(parts, greedy("a", PROMPTS[0], 3))
        cache = parts.engine._cache
        tables = list(tables_of(cache._tree, cache._pools, (cache._tables, cache._seats)))
        compared = {address(table.cells) for table in tables}
        assert len({table.name for table in tables}) == len(tables) == len(compared)
        seen = [(path, array) for path, array in arrays(cache) if address(array) in compared]
        assert len({address(array) for _, array in seen}) == len(tables)
        lone = [path for path, array in arrays(cache) if address(array) not in compared]
        assert not [path for path in lone if not LEFT_OUT.search(path)]

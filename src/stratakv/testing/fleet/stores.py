"""What a fleet stores its pages in: a store for each rank, or one for all. It outlives the fleet,
so that another one may find what the first has left.

Owns the bytes of the stores, and the check that every object is what its key names: whole, and the
very slice of the very page. Must not know how objects come and go.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from stratakv.core.ids import PageKey
from stratakv.core.page_keys import Namespace, PageHasher
from stratakv.engine.namespaces import Namespaces
from stratakv.engine.ranks.step_messages import Submit
from stratakv.engine.request import Prompt
from stratakv.spec.groups import CacheGroup, CacheSpec
from stratakv.storage.backend import Everything, ObjectKey, ReadStatus, StoreFormat
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.fleet.runner import Numbers, as_kept, by_head, expected_tokens, state_after
from stratakv.testing.fleet.scenario import ADAPTERS, Plan

MODEL: Final = b"tokens"


class Shelf:
    """One store. ``names``: what was ever written to it, oldest first."""

    def __init__(self, form: StoreFormat, quota_bytes: int) -> None:
        self.memory = MemoryBackend(form, quota_bytes)
        self.names: dict[ObjectKey, None] = {}


class Stores:
    """For a plan and whatever comes after it."""

    def __init__(self, plan: Plan) -> None:
        one = plan.one_store
        spec = plan.spec if one is None else one.sharding.stored(one.cut)
        form = StoreFormat.of(spec)
        self._slices = [
            1 if one is None else one.sharding.slices(group.id, one.cut)
            for group in plan.spec.groups
        ]
        quota = plan.store_objects * max(form.page_bytes) * max(self._slices)
        self._shelves = [Shelf(form, quota) for _ in range(plan.ranks if one is None else 1)]
        self._sizes = form.page_bytes
        self._objects: dict[ObjectKey, bytes] = {}

    def of(self, rank: int) -> Shelf:
        return self._shelves[rank % len(self._shelves)]

    def check(self, plan: Plan) -> int:
        """How many objects there are, of those that requests of ``plan``, or of a plan before it,
        may have left. AssertionError for one that is not what it should be."""
        self._objects |= _objects(plan, self._slices)
        names = list(self._objects)
        room = [memoryview(bytearray(self._sizes[name.group])) for name in names]
        found = 0
        for at, shelf in enumerate(self._shelves):
            for name, status, page in zip(names, shelf.memory.read(names, room), room, strict=True):
                assert status is not ReadStatus.CORRUPT, (
                    f"store {at}: {_description(name)} is broken"
                )
                if status is ReadStatus.HIT:
                    found += 1
                    right = bytes(page) == self._objects[name]
                    assert right, (
                        f"store {at}: {_description(name)} has the bytes of something else"
                    )
        return found

    def empty(self) -> int:
        """Throw everything away; how many objects there were."""
        return sum(shelf.memory.remove(Everything.EVERYTHING) for shelf in self._shelves)


def namespaces(spec: CacheSpec) -> Namespaces:
    """``spec``: of all ranks together."""
    return Namespaces(Namespace(model=MODEL, spec_digest=spec.digest), ADAPTERS)


def _description(name: ObjectKey) -> str:
    return f"object {name.shard} of page {name.page.hex()[:8]} of group {name.group}"


def _objects(plan: Plan, slices: Sequence[int]) -> dict[ObjectKey, bytes]:
    """All that the plan's requests can leave in a store, and the bytes of each."""
    spaces, page_tokens = namespaces(plan.spec), plan.spec.page_tokens
    pages: dict[PageKey, Numbers] = {}
    for prompt in _prompts(plan):
        hasher = PageHasher(spaces.of(prompt.adapter, prompt.salt), page_tokens)
        place = spaces.place(prompt.adapter)
        output = expected_tokens(prompt.tokens, prompt.sampling.max_tokens, place)
        tokens = np.array([*prompt.tokens.tolist(), *output], np.int32)
        hasher.extend(tokens)
        kept = as_kept(tokens, place)
        for at, key in enumerate(hasher.keys):
            pages[key] = kept[: (at + 1) * page_tokens]
    return {
        name: payload
        for key, prefix in pages.items()
        for group in plan.spec.groups
        for name, payload in _slices(key, group, prefix, page_tokens, slices[group.id])
    }


def _prompts(plan: Plan) -> Iterable[Prompt]:
    return (event.command.prompt for event in plan.events if isinstance(event.command, Submit))


def _slices(
    key: PageKey, group: CacheGroup, prefix: Numbers, page_tokens: int, count: int
) -> Iterator[tuple[ObjectKey, bytes]]:
    """Of the page at the end of ``prefix``: names and bytes. Of a group cut in ``count``, slice i
    is number count * (count - 1) / 2 + i."""
    if group.scratch or not group.buffers:
        return
    if group.stateful:
        yield ObjectKey(key, group.id), np.array(state_after(prefix), np.float32).tobytes()
        return
    first, heads = count * (count - 1) // 2, group.buffers[0].row_shape[0] // count
    for at in range(count):
        rows = by_head(prefix[-page_tokens:], at * heads, heads)
        yield ObjectKey(key, group.id, first + at), rows.tobytes()

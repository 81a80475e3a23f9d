"""The comparison behind "hit == recompute" fails whenever a page is lost: each fault here is seeded
into one step of a page's way, and must not pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest

from stratakv.core.ids import PageIds
from stratakv.memory.block_table import BlockTable
from stratakv.tiers.tiered_cache import TieredCache
from stratakv.transfer.copier import Copier, CopyRoute
from stratakv.transfer.cpu import DEFAULT_COPIER
from stratakv.tree.leases import Leases
from tests.engines import evict_device
from tests.hit_cases import Lab, lab, prompt, prove_reuse

FAMILIES = pytest.mark.parametrize("family", ["llama", "gemma3"])
KINDS = pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "qwen3_next", "bamba"])
PAGE = 16


class LyingCopier:
    """Copies between other pages than it was told to; each fault sees (device, host)."""

    def __init__(
        self,
        on_backup: Callable[[PageIds, PageIds], tuple[PageIds, PageIds]],
        on_load: Callable[[PageIds, PageIds], tuple[PageIds, PageIds]],
    ) -> None:
        self._on_backup = on_backup
        self._on_load = on_load

    def gather(self, route: CopyRoute, device: PageIds, host: PageIds) -> None:
        DEFAULT_COPIER.gather(route, *self._on_backup(device, host))

    def scatter(self, route: CopyRoute, device: PageIds, host: PageIds) -> None:
        DEFAULT_COPIER.scatter(route, *self._on_load(device, host))


def honest(device: PageIds, host: PageIds) -> tuple[PageIds, PageIds]:
    return device, host


def shifted(pages: PageIds) -> PageIds:
    """Each place gets the page before it. (To swap two pages of one prefix would prove nothing:
    keys carry their positions, so full attention does not mind the order.)"""
    return np.concatenate((pages[:1], pages[:-1]))


def off_by_one(device: PageIds, host: PageIds) -> tuple[PageIds, PageIds]:
    return device, shifted(host)


def neighbour(device: PageIds, host: PageIds) -> tuple[PageIds, PageIds]:
    """The last page is taken from where another one lies: a stale page of an earlier owner."""
    stale = device.copy()
    stale[-1] = (stale[-1] + 1) % (4096 // PAGE)
    return stale, host


def nothing(device: PageIds, host: PageIds) -> tuple[PageIds, PageIds]:
    return device[:0], host[:0]


COPIERS = {
    "load from shifted pages": LyingCopier(honest, off_by_one),
    "load that lands nothing": LyingCopier(honest, nothing),
    "backup of a stale page": LyingCopier(neighbour, honest),
    "backup that saves nothing": LyingCopier(nothing, honest),
}


def load_back(this: Lab) -> None:
    first = prompt(PAGE, 1)
    this.ask(first)
    evict_device(this.parts)
    this.ask(first)


def duplicate_page(this: Lab) -> None:
    exact = prompt(PAGE, 3, 9 * PAGE)
    this.ask(exact)
    this.ask(exact)


@KINDS
@pytest.mark.parametrize("path", [load_back, duplicate_page])
def test_the_same_paths_pass_without_a_fault(family, path):
    with lab(family, PAGE, copier=LyingCopier(honest, honest)) as this:
        path(this)


@KINDS
@pytest.mark.parametrize("fault", COPIERS)
def test_a_copy_that_moves_the_wrong_page_is_seen(family, fault):
    copier: Copier = COPIERS[fault]
    with lab(family, PAGE, copier=copier) as this, pytest.raises(AssertionError, match="differ"):
        load_back(this)


@contextmanager
def forgotten_remap() -> Iterator[None]:
    """A duplicate page is freed, and the request goes on reading it."""
    insert = TieredCache.insert

    def without_remap(self: TieredCache, keys, first, pages):
        insert(self, keys, first, pages)
        return []

    with mock.patch.object(TieredCache, "insert", without_remap):
        yield


@contextmanager
def table_off_by_one() -> Iterator[None]:
    remap = BlockTable.remap

    def wrong(self: BlockTable, row, group, first, pages):
        remap(self, row, group, first, shifted(pages))

    with mock.patch.object(BlockTable, "remap", wrong):
        yield


@contextmanager
def lease_that_pins_too_little() -> Iterator[None]:
    """A request's prefix is named by the tree but may be evicted: here it is, before the read."""
    take = Leases.take

    def unpinned(self: Leases, keys, end, **how):
        taken = take(self, keys, end, **how)
        for group in range(len(taken.starts) if end else 0):
            poison[group](self.pages(taken, group)[-1:])
        return taken

    with mock.patch.object(Leases, "take", unpinned):
        yield


poison: list[Callable[[PageIds], None]] = []


@FAMILIES
@pytest.mark.parametrize("fault", [forgotten_remap, table_off_by_one, lease_that_pins_too_little])
def test_a_page_table_that_names_the_wrong_page_is_seen(family, fault):
    with lab(family, PAGE) as this:
        poison[:] = [
            lambda pages, g=group.id: this.parts.pools.poison(g, pages)
            for group in this.spec.groups
        ]
        with fault(), pytest.raises(AssertionError, match="differ"):
            duplicate_page(this)


@FAMILIES
def test_the_short_proof_sees_it_too(family):
    with table_off_by_one(), pytest.raises(AssertionError, match="Differs"):
        prove_reuse(family)


@FAMILIES
def test_a_gate_that_opens_too_early_is_seen(family):
    """The forward reads pages that the load has not reached: they are still NaN."""
    with lab(family, PAGE) as this:
        this.ask(prompt(PAGE, 1))
        evict_device(this.parts)
        submit, held = this.parts.transfer.submit, []

        def late(plan):
            held.append(plan)
            return submit(type(plan)(plan.direction, ()))  # its gate has nothing to wait for

        with (
            mock.patch.object(this.parts.transfer, "submit", late),
            pytest.raises(AssertionError, match="differ"),
        ):
            this.ask(prompt(PAGE, 1))
        assert held, "nothing was loaded"

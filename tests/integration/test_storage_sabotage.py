"""The tests of storage have teeth: each fault here is seeded into one step of a page's way there
and back, and the comparison behind "hit == recompute", or a count of tokens, must not pass.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest

from stratakv.core.ids import NONE
from stratakv.engine.namespaces import Namespaces
from stratakv.policy.prefetch_book import PrefetchBook
from stratakv.policy.prefetch_ends import Ends
from stratakv.storage import memory
from stratakv.storage.file.reader import PageReader
from stratakv.tiers import persist
from stratakv.tiers.prefetch.fetches import Fetches
from tests.engines import on_device, on_storage
from tests.hit_cases import last_end, prompt
from tests.storage_cases import (
    QUICK,
    Shelf,
    check_sums,
    evict_all,
    file_url,
    objects_of,
    of_each,
    settled,
    shelf_for,
    shelf_lab,
    storage_lab,
)
from tests.storage_files import flip, place_of

PAGE = 16
TOKENS = prompt(PAGE, 1)
END = last_end(len(TOKENS), PAGE)
SEVERAL = ("llama", "gemma3", "deepseek_v3", "llama4", "qwen3_next")
"""Of a state there is one page to a prefix: nothing to exchange it with."""
KINDS = (*SEVERAL, "mamba2")
several = of_each(SEVERAL)
kinds = of_each(KINDS, quick=(*QUICK, "mamba2"))
with_any_end = of_each(("llama", "deepseek_v3", "gemma3"), quick=("llama", "gemma3"))
with_windows = of_each(("gemma3", "llama4"))


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="stratakv")


def stored(family) -> Shelf:
    shelf = shelf_for(family, PAGE)
    with shelf_lab(family, PAGE, shelf) as this:
        this.ask(TOKENS)
        this.ask(prompt(PAGE, 2))
    return shelf


def restart(family, shelf) -> None:
    """The paths of the tests of a restart. Of the prefix a part is used too: full attention, whose
    keys carry their positions, does not mind in which order the pages of the whole lie."""
    with shelf_lab(family, PAGE, shelf) as this:
        assert this.ask(TOKENS).cached == on_storage(this.spec, END)
        this.ask([*TOKENS[: END // 2], *prompt(PAGE, 3, 20)])
        evict_all(this)
        assert this.ask(TOKENS).cached == on_storage(this.spec, END)


def shifted(things: list) -> list:
    """Each place gets the thing before it, and the last one is lost."""
    return things[:1] + things[:-1]


def swapped(things: list) -> list:
    """The first and the last one are exchanged."""
    return things[-1:] + things[1:-1] + things[:1] if len(things) > 1 else things


def by_size(order, pages: list) -> list:
    """``order`` of the pages of each group: those of other groups have another size."""
    mixed = list(pages)
    for size in set(map(len, pages)):
        at = [i for i, page in enumerate(pages) if len(page) == size]
        for to, take in zip(at, order(at), strict=True):
            mixed[to] = pages[take]
    return mixed


@contextmanager
def wrong_on_write(order) -> Iterator[None]:
    job = persist.Store
    with mock.patch.object(persist, "Store", lambda keys, pages: job(keys, by_size(order, pages))):
        yield


@contextmanager
def wrong_on_fetch(order) -> Iterator[None]:
    buffers = Fetches.buffers
    with mock.patch.object(Fetches, "buffers", lambda *this: by_size(order, buffers(*this))):
        yield


@kinds
def test_without_a_fault_it_passes(family):
    restart(family, stored(family))


@several
def test_pages_stored_under_the_next_ones_names_are_seen(family):
    with wrong_on_write(shifted):
        shelf = stored(family)
    with pytest.raises(AssertionError, match="differ"):
        restart(family, shelf)


@with_any_end
def test_two_pages_that_are_swapped_on_write_are_seen(family):
    with wrong_on_write(swapped):
        shelf = stored(family)
    with pytest.raises(AssertionError, match="differ"):
        restart(family, shelf)


@kinds
def test_the_neighbours_page_on_a_read_is_seen(family):
    """A store that answers with another object of the same group, whose checksum is right."""
    shelf = stored(family)
    read = Shelf.read

    def neighbours(self, keys, into):
        by_group = {
            key.group: [one for one in self._objects if one.group == key.group] for key in keys
        }
        same = [by_group[key.group] for key in keys]
        wrong = [of[of.index(key) - 1] for key, of in zip(keys, same, strict=True)]
        return read(self, wrong, into)

    with (
        mock.patch.object(Shelf, "read", neighbours),
        pytest.raises(AssertionError, match="differ"),
    ):
        restart(family, shelf)


@several
def test_a_fetch_into_the_next_ones_buffers_is_seen(family):
    shelf = stored(family)
    with wrong_on_fetch(shifted), pytest.raises(AssertionError, match="differ"):
        restart(family, shelf)


@with_any_end
def test_two_buffers_that_are_swapped_on_a_fetch_are_seen(family):
    shelf = stored(family)
    with wrong_on_fetch(swapped), pytest.raises(AssertionError, match="differ"):
        restart(family, shelf)


@kinds
def test_a_namespace_without_the_salt_is_seen(family):
    shelf = shelf_for(family, PAGE)
    of = Namespaces.of

    def salts() -> None:
        with shelf_lab(family, PAGE, shelf) as this:
            this.ask(TOKENS, salt="a")
        with shelf_lab(family, PAGE, shelf) as this:
            assert this.ask(TOKENS, salt="b").cached == on_device(this.spec, 0)

    with (
        mock.patch.object(Namespaces, "of", lambda self, adapter, salt: of(self, adapter, "")),
        pytest.raises(AssertionError),
    ):
        salts()
    shelf._objects.clear()
    salts()


@with_windows
def test_one_page_short_of_a_window_is_seen(family):
    """The fetch leaves out the first page of the window, and the landing calls it whole."""
    plan = Ends.plan

    def short(self, held, end):
        found = plan(self, held, end)
        allocate = (found.allocate[0], found.allocate[1][1:])
        first = found.allocate[1][0]
        keep = ~((found.objects.groups == 1) & (found.objects.pages == first))
        objects = type(found.objects)(found.objects.groups[keep], found.objects.pages[keep])
        return replace(found, allocate=allocate, objects=objects)

    shelf = stored(family)
    with mock.patch.object(Ends, "plan", short), pytest.raises(AssertionError):
        restart(family, shelf)


@with_windows
def test_a_window_page_that_arrived_and_is_not_landed_is_seen(family):
    land = Fetches.land

    def short(self, keys, landed, mine):
        keep = [flags.copy() for flags in landed.keep]
        keep[1][0] = False
        return land(self, keys, replace(landed, keep=tuple(keep)), mine)

    shelf = stored(family)
    with mock.patch.object(Fetches, "land", short), pytest.raises(AssertionError):
        restart(family, shelf)


@kinds
@pytest.mark.parametrize("checked", [True, False])
def test_a_flipped_byte_is_seen_when_nobody_checks_it(family, checked):
    shelf = stored(family)
    with shelf_lab(family, PAGE, shelf) as this:
        group = max(group.id for group in this.spec.groups if group.page_bytes)
        bad = objects_of(this, TOKENS, group)[END // PAGE - 1]
    data, _ = shelf._objects[bad]
    for at in range(3, len(data), 4):  # the sign and the exponent of a little-endian float
        data[at] ^= 0x80
    if checked:
        with shelf_lab(family, PAGE, shelf) as this:
            assert this.ask(TOKENS).cached.total < END
        return
    unchecked = {key: (data, 0) for key, (data, _) in shelf._objects.items()}
    with (
        mock.patch.object(memory, "payload_hash", return_value=0),
        mock.patch.dict(shelf._objects, unchecked),
        pytest.raises(AssertionError, match="differ"),
    ):
        restart(family, shelf)


@of_each()
def test_a_flipped_byte_on_the_disk_is_seen_when_nobody_checks_it(family, tmp_path):
    url = file_url(tmp_path)
    with storage_lab(family, PAGE, url) as this:
        this.ask(TOKENS)
        settled(this)
        group = max(group.id for group in this.spec.groups if group.page_bytes)
        bad = objects_of(this, TOKENS, group)[END // PAGE - 1]
        floats = this.spec.groups[group].page_bytes // 4
    path, _, payload = place_of(tmp_path, bad)
    for at in range(floats):
        flip(path, payload + 4 * at + 3, bit=7)
    read = PageReader.read

    def unchecked(self, rows, into):
        """Every page has the hash that it should have."""
        read(self, rows, into)
        return self._index.headers["payload_hash"][rows].tolist()

    with (
        storage_lab(family, PAGE, url) as this,
        mock.patch.object(PageReader, "read", unchecked),
        pytest.raises(AssertionError, match="differ"),
    ):
        this.ask(TOKENS)


@of_each(("llama", "gemma3"))
def test_a_page_that_is_freed_while_it_is_read_into_is_seen(family):
    """Fetched pages go back before the I/O has ended; poison is what others would have written."""
    allocate = Fetches.allocate

    def early(self, plan):
        pages = allocate(self, plan)
        self.free(pages)
        return pages

    shelf = stored(family)
    with mock.patch.object(Fetches, "allocate", early), pytest.raises(AssertionError):
        restart(family, shelf)


@of_each(("llama", "gemma3", "qwen3_next"))
def test_a_page_stored_before_it_is_written_is_seen(family):
    """The host page is stored when the backup begins, and not when it has ended."""
    begin = persist.Persister.want

    def stale(self, effect):
        begin(self, effect)
        nodes = self._stored._nodes
        pages = nodes.page[1][effect.group][effect.nodes]
        if (pages != NONE).all():
            self._arenas[effect.group].poison(pages[-1:])

    with mock.patch.object(persist.Persister, "want", stale):
        shelf = stored(family)
    with pytest.raises(AssertionError, match="differ"):
        restart(family, shelf)


def test_an_ask_that_is_counted_twice_is_seen():
    """The identity of what was found."""
    settle = PrefetchBook.settle

    def twice(self, ask, used_end, reason):
        settle(self, ask, used_end, reason)
        self.counters.hits += 1

    shelf = stored("llama")
    with (
        mock.patch.object(PrefetchBook, "settle", twice),
        shelf_lab("llama", PAGE, shelf) as this,
    ):
        this.ask(TOKENS)
        with pytest.raises(AssertionError):
            check_sums(this)

"""What storage has lost, or holds damaged: the largest end that is whole is used, exactly, or
nothing; the rest is counted under its reason, computed, and stored again.
"""

import logging
from contextlib import closing

import pytest

from stratakv.core.clock import WallClock
from stratakv.spec.retention import needed
from stratakv.storage.file.fsck import fsck
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.store import FileStore
from tests.engines import on_storage
from tests.hit_cases import last_end, prompt
from tests.storage_cases import (
    evict_all,
    file_url,
    format_of,
    lost_alone,
    objects_of,
    of_each,
    shelf_for,
    shelf_lab,
    storage_lab,
    stored_pages,
    usable_end,
)
from tests.storage_files import flip_payload

PAGE = 16
TOKENS = prompt(PAGE, 1)
END = last_end(len(TOKENS), PAGE)
LAST = END // PAGE - 1
STATES = ("qwen3_next", "falcon_h1", "mamba2")
SPLIT = ("gemma3", "gpt_oss", "llama4", "qwen3_next", "falcon_h1")
"""Families with an anchor and another group that have bytes."""
kinds = of_each()
split = of_each(SPLIT)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="stratakv")


def last_group(this) -> int:
    return this.spec.groups[-1].id


@kinds
@pytest.mark.parametrize("gone", [0, LAST // 2, LAST])
def test_a_page_of_the_first_group_with_bytes_is_missing(family, gone):
    """Also the only page of a state."""
    shelf = shelf_for(family, PAGE)
    with shelf_lab(family, PAGE, shelf) as this:
        this.ask(TOKENS)
    with shelf_lab(family, PAGE, shelf) as this:
        group = 0 if this.spec.groups[0].page_bytes else 1
        gone = gone if group == 0 else LAST
        assert shelf.remove([objects_of(this, TOKENS, group)[gone]]) == 1
        best = usable_end(this, stored_pages(this, shelf, TOKENS), len(TOKENS))
        assert best < END
        assert best == gone * PAGE or family not in ("llama", "deepseek_v3")
        assert this.ask(TOKENS).cached == on_storage(this.spec, best)
        rest = 0 if group else gone * PAGE - best
        missing = "state_missing" if family in STATES else "window_incomplete"
        assert lost_alone(this) == ({missing: rest} if rest else {})
    assert shelf.contains([objects_of(this, TOKENS, group)[gone]]).all(), "it was not stored again"
    with shelf_lab(family, PAGE, shelf) as this:
        assert this.ask(TOKENS).cached == on_storage(this.spec, END)


@split
def test_a_page_of_a_window_or_a_state_is_missing(family):
    shelf = shelf_for(family, PAGE)
    with shelf_lab(family, PAGE, shelf) as this:
        this.ask(TOKENS)
    with shelf_lab(family, PAGE, shelf) as this:
        group = last_group(this)
        assert shelf.remove([objects_of(this, TOKENS, group)[LAST]]) == 1
        best = usable_end(this, stored_pages(this, shelf, TOKENS), len(TOKENS))
        assert this.ask(TOKENS).cached == on_storage(this.spec, best)
        missing = "state_missing" if family in STATES else "window_incomplete"
        assert lost_alone(this) == {missing: END - best}
    with shelf_lab(family, PAGE, shelf) as this:
        assert this.ask(TOKENS).cached == on_storage(this.spec, END)


@kinds
@pytest.mark.parametrize("of", ["first group", "last group"])
def test_a_flipped_byte_on_the_disk_is_never_served(family, of, tmp_path):
    url = file_url(tmp_path)
    with storage_lab(family, PAGE, url) as this:
        this.ask(TOKENS)
        this.parts.cache.progress.settle()
        group = last_group(this)
        if of == "first group" and this.spec.groups[0].page_bytes:
            group = 0
        bad = objects_of(this, TOKENS, group)[LAST]
        keeping = StoreLimits(quota_bytes=64 << 20)
        with closing(FileStore(tmp_path, format_of(this.spec), keeping, WallClock())) as backend:
            stored = stored_pages(this, backend, TOKENS)
    flip_payload(tmp_path, bad, at=777)
    assert fsck(tmp_path).bad_payloads == 1
    with storage_lab(family, PAGE, url) as this:
        # A fetch asks for what the longest end needs: of a window nothing of an earlier end's.
        asked = [
            pages.intersection(needed(each.retention, END, PAGE))
            for pages, each in zip(stored, this.spec.groups, strict=True)
        ]
        asked[group].remove(LAST)
        best = usable_end(this, asked, len(TOKENS))
        assert this.ask(TOKENS).cached == on_storage(this.spec, best)
        assert lost_alone(this) == {"corrupt": END - best}
        this.parts.cache.progress.settle()
        evict_all(this)
        assert this.ask(TOKENS).cached == on_storage(this.spec, END), "it was not stored again"
    with storage_lab(family, PAGE, url) as this:
        assert this.ask(TOKENS).cached == on_storage(this.spec, END)
    found = fsck(tmp_path)
    assert (found.bad_payloads, found.bad_headers, found.broken) == (0, 0, 0)
    assert found.quarantined <= 1


@kinds
@pytest.mark.parametrize("room", [1, 3, 5, LAST])
def test_a_host_that_is_too_small_for_the_hit(family, room):
    """The largest end for which every group has the pages."""
    shelf = shelf_for(family, PAGE)
    with shelf_lab(family, PAGE, shelf) as this:
        this.ask(TOKENS)
        groups = len(this.spec.groups)
    host = (room, *[256] * (groups - 1))
    with shelf_lab(family, PAGE, shelf, host=host, prefetch_share=1.0) as this:
        best = usable_end(this, stored_pages(this, shelf, TOKENS), len(TOKENS), host)
        assert best == room * PAGE or family not in ("llama", "deepseek_v3")
        assert this.ask(TOKENS).cached == on_storage(this.spec, best)
        assert lost_alone(this) == {"host_capacity": END - best}


@split
def test_a_host_that_has_no_room_for_the_window_or_the_state(family):
    shelf = shelf_for(family, PAGE)
    with shelf_lab(family, PAGE, shelf) as this:
        this.ask(TOKENS)
        wanted = len(needed(this.spec.groups[-1].retention, END, PAGE))
        host = (*[256] * (len(this.spec.groups) - 1), wanted - 1)
    with shelf_lab(family, PAGE, shelf, host=host) as this:
        best = usable_end(this, stored_pages(this, shelf, TOKENS), len(TOKENS), host)
        assert best < END
        assert this.ask(TOKENS).cached == on_storage(this.spec, best)
        assert lost_alone(this) == {"host_capacity": END - best}

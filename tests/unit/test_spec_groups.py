"""A spec that could not describe a cache cannot be built; specs that differ have other digests."""

import hashlib
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratakv.core.errors import ConfigError
from stratakv.core.ids import GroupId, LayerId
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec, Home
from stratakv.spec.kinds import LayerBuffer, PageFormat, compressed, open_block
from stratakv.spec.retention import (
    KeepAll,
    KeepBoundary,
    KeepChunk,
    KeepLive,
    KeepWindow,
    Retention,
)

LAYERS = (LayerId(0), LayerId(3))
K = BufferSpec(name="k", layers=LAYERS, rows_per_page=16, row_shape=(2, 8), dtype="bfloat16")
V = replace(K, name="v", dtype="float32")
ANCHOR = CacheGroup(id=GroupId(0), name="anchor", retention=KeepAll(), buffers=(K, V))
SWA = CacheGroup(id=GroupId(1), name="swa", retention=KeepWindow(64), buffers=(K,))
SPEC = CacheSpec(page_tokens=16, groups=(ANCHOR, SWA))


def test_bytes_are_counted_per_row_layer_page_and_group() -> None:
    assert (K.row_bytes, K.layer_bytes, K.page_bytes) == (32, 512, 1024)
    assert ANCHOR.page_bytes == 1024 + 2048
    assert replace(ANCHOR, buffers=()).page_bytes == 0


@pytest.mark.parametrize(
    ("rule", "keeps_all", "stateful", "scratch"),
    [
        (KeepAll(), True, False, False), (KeepWindow(8), False, False, False),
        (KeepChunk(8), False, False, False), (KeepBoundary(), False, True, False),
        (KeepLive(), False, True, True),
    ],
    ids=str,
)  # fmt: skip
def test_a_groups_rule_says_how_long_its_pages_live(
    rule: Retention, keeps_all: bool, stateful: bool, scratch: bool
) -> None:
    group = replace(SWA, retention=rule)
    assert (group.keeps_all, group.stateful, group.scratch) == (keeps_all, stateful, scratch)


def test_a_row_may_have_one_element() -> None:
    one = replace(K, rows_per_page=1, row_shape=(1,), layers=(LayerId(7),), dtype="uint8")
    assert (one.row_bytes, one.layer_bytes, one.page_bytes) == (1, 1, 1)
    assert LayerBuffer(KeepAll(), "k", 1, (1, 1), "uint8").row_shape == (1, 1)
    with pytest.raises(ConfigError, match=r"buffer k: a row of shape \(2, 0\) has no bytes"):
        LayerBuffer(KeepAll(), "k", 1, (2, 0), "uint8")


@pytest.mark.parametrize("kind", [compressed, open_block])
def test_no_block_of_tokens_lies_on_two_pages(kind: Callable[..., LayerBuffer]) -> None:
    with pytest.raises(ConfigError, match=r"--page-tokens 20: .* 16 tokens .* multiples of 16"):
        kind(PageFormat(20, "uint8"), name="c16", ratio=16, dim=8)
    rows = PageFormat(48, "uint8").rows(16)
    assert (rows, type(rows)) == (3, int)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int4"}, "dtype int4"), ({"rows_per_page": 0}, "no bytes"),
        ({"row_shape": ()}, "no bytes"), ({"row_shape": (2, 0)}, "no bytes"),
        ({"layers": ()}, "no bytes"), ({"layers": (LayerId(1), LayerId(1))}, "a layer twice"),
    ],
)  # fmt: skip
def test_a_buffer_without_bytes_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(K, **change)


def test_a_group_names_each_buffer_once() -> None:
    with pytest.raises(ValueError, match="a buffer twice"):
        replace(ANCHOR, buffers=(K, K))


@pytest.mark.parametrize("groups", [(), (replace(SWA, id=GroupId(0)),)])
def test_the_first_group_keeps_every_page(groups: tuple[CacheGroup, ...]) -> None:
    with pytest.raises(ValueError, match="the anchor, must keep every page"):
        CacheSpec(page_tokens=16, groups=groups)


def test_group_ids_count_up_and_a_page_holds_a_token() -> None:
    with pytest.raises(ValueError, match="0, 1, 2"):
        CacheSpec(page_tokens=16, groups=(ANCHOR, replace(SWA, id=GroupId(2))))
    with pytest.raises(ValueError, match="page_tokens must be at least 1"):
        CacheSpec(page_tokens=0, groups=(ANCHOR,))


OTHERS = {
    "page": replace(SPEC, page_tokens=32),
    "group": replace(SPEC, groups=(ANCHOR,)),
    "window": replace(SPEC, groups=(ANCHOR, replace(SWA, retention=KeepWindow(65)))),
    "chunk": replace(SPEC, groups=(ANCHOR, replace(SWA, retention=KeepChunk(64)))),
    "state": replace(SPEC, groups=(ANCHOR, replace(SWA, retention=KeepBoundary()))),
    "dtype": replace(SPEC, groups=(ANCHOR, replace(SWA, buffers=(replace(K, dtype="float16"),)))),
    "rows": replace(SPEC, groups=(ANCHOR, replace(SWA, buffers=(replace(K, rows_per_page=8),)))),
    "shape": replace(SPEC, groups=(ANCHOR, replace(SWA, buffers=(replace(K, row_shape=(16,)),)))),
    "layers": replace(
        SPEC, groups=(ANCHOR, replace(SWA, buffers=(replace(K, layers=(LayerId(0),)),)))
    ),
    "order": replace(SPEC, groups=(replace(ANCHOR, buffers=(V, K)), SWA)),
}


def test_specs_that_cannot_read_each_others_pages_have_other_digests() -> None:
    digests = {name: spec.digest for name, spec in {**OTHERS, "itself": SPEC}.items()}
    assert len(set(digests.values())) == len(digests)
    assert {len(digest) for digest in digests.values()} == {16}


def test_a_digest_is_of_these_words_so_that_stores_are_found_again() -> None:
    """Pages on disk are named by it: other words would lose every store that exists."""
    words = (
        '{"groups": [{"buffers": [{"dtype": "bfloat16", "layers": [0, 3], "name": "k", '
        '"row_shape": [2, 8], "rows_per_page": 16}], "id": 0, "name": "anchor", '
        '"retention": "KeepAll()"}, {"buffers": [], "id": 1, "name": "swa", '
        '"retention": "KeepWindow(tokens=64)"}], "page_tokens": 16}'
    )
    spec = replace(SPEC, groups=(replace(ANCHOR, buffers=(K,)), replace(SWA, buffers=())))
    assert spec.digest == hashlib.sha256(words.encode()).digest()[:16]


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 4096))
def test_a_digest_depends_on_nothing_but_the_spec(page: int, window: int) -> None:
    def build() -> CacheSpec:
        swa = replace(SWA, retention=KeepWindow(window))
        return CacheSpec(page_tokens=page, groups=(ANCHOR, swa))

    assert build().digest == build().digest


def test_where_pages_may_be_is_nothing_that_a_digest_knows() -> None:
    kept = replace(SWA, retention=KeepAll())
    away = replace(kept, home=Home.HOST)
    specs = [replace(SPEC, groups=(ANCHOR, group)) for group in (kept, away)]
    assert specs[0].digest == specs[1].digest


@pytest.mark.parametrize("group", [ANCHOR, SWA, replace(SWA, retention=KeepAll(), buffers=())])
def test_only_what_keeps_all_and_has_bytes_can_be_at_home_on_the_host(group: CacheGroup) -> None:
    with pytest.raises(ValueError, match="home on the host"):
        replace(group, home=Home.HOST)

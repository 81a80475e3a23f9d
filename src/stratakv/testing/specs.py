"""Cache specs for tests: any mixture of retention rules, small enough that everything collides.

Owns the shapes. Must not know trees, pools or models.
"""

from collections.abc import Sequence
from typing import Final

from hypothesis import strategies as st

from stratakv.core.ids import GroupId, LayerId
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import (
    KeepAll,
    KeepBoundary,
    KeepChunk,
    KeepLive,
    KeepWindow,
    Retention,
)

MAX_GROUPS: Final = 5
MAX_PAGE_TOKENS: Final = 4


def small_spec(
    rules: Sequence[Retention], *, page_tokens: int, anchor_bytes: bool = True
) -> CacheSpec:
    """A spec with an anchor and one group per rule behind it, a few bytes per row."""
    groups = [
        CacheGroup(
            id=GroupId(index),
            name=f"g{index}",
            retention=rule,
            buffers=(_rows(index, page_tokens),) if index or anchor_bytes else (),
        )
        for index, rule in enumerate((KeepAll(), *rules))
    ]
    return CacheSpec(page_tokens=page_tokens, groups=tuple(groups))


def _rows(index: int, page_tokens: int) -> BufferSpec:
    return BufferSpec(
        name="rows",
        layers=(LayerId(index),),
        rows_per_page=page_tokens,
        row_shape=(2,),
        dtype="uint8",
    )


def retentions(page_tokens: int) -> st.SearchStrategy[Retention]:
    """Any rule, with windows and chunks of up to about four pages, aligned or not."""
    tokens = st.integers(1, 4 * page_tokens + 1)
    kinds: tuple[st.SearchStrategy[Retention], ...] = (
        st.builds(KeepWindow, tokens),
        st.just(KeepBoundary()),
        st.builds(KeepChunk, tokens),
        st.just(KeepAll()),
        st.just(KeepLive()),
    )
    return st.one_of(*kinds)


@st.composite
def specs(draw: st.DrawFn) -> CacheSpec:
    """One to five groups; an anchor without bytes only where another group can end a prefix."""
    page_tokens = draw(st.integers(1, MAX_PAGE_TOKENS))
    others = draw(st.integers(0, MAX_GROUPS - 1))
    rules = [draw(retentions(page_tokens)) for _ in range(others)]
    ends = any(isinstance(rule, KeepBoundary | KeepWindow | KeepAll) for rule in rules)
    anchor_bytes = not ends or draw(st.booleans())
    return small_spec(rules, page_tokens=page_tokens, anchor_bytes=anchor_bytes)

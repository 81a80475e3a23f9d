"""Bytes to pages: exact, never over, used up, monotone; and flags that are refused by name."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stratakv.core.errors import ConfigError
from stratakv.core.ids import GroupId, LayerId
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.memory.layout import HostPageLayout
from stratakv.spec.budget import (
    ExpectedLoad,
    HostAuto,
    HostMemory,
    HostRatio,
    Shortage,
    checkpoint_parts,
    device_bytes,
    device_pages,
    host_budget,
    host_bytes,
    host_pages,
    pages_beside,
    shortage,
)
from stratakv.spec.budget_table import BudgetTable
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import (
    KeepAll,
    KeepBoundary,
    KeepChunk,
    KeepLive,
    KeepWindow,
    Retention,
)

LOAD = ExpectedLoad(max_running=4, max_model_len=4096, chunk_tokens=256)
SIZE = st.integers(1, 5000)
RULES = st.one_of(
    st.just(KeepAll()), st.builds(KeepWindow, SIZE), st.builds(KeepChunk, SIZE),
    st.just(KeepBoundary()), st.just(KeepLive()),
)  # fmt: skip
LOADS = st.builds(
    ExpectedLoad, max_running=st.integers(1, 64), max_model_len=st.integers(1, 9000),
    chunk_tokens=st.integers(1, 1024), chat_tokens=st.integers(1, 9000),
)  # fmt: skip
GENEROUS = 10**15


def group(index: int, rule: Retention, row: int, page_tokens: int) -> CacheGroup:
    """One uint8 buffer of ``row`` bytes per token or snapshot; none where ``row`` is 0."""
    rows = page_tokens if isinstance(rule, KeepAll | KeepWindow | KeepChunk) else 1
    buffer = BufferSpec(
        name="b", layers=(LayerId(0),), rows_per_page=rows, row_shape=(max(row, 1),), dtype="uint8"
    )
    buffers = (buffer,) if row else ()
    return CacheGroup(id=GroupId(index), name=f"g{index}", retention=rule, buffers=buffers)


@st.composite
def specs(draw: st.DrawFn) -> CacheSpec:
    page = draw(st.integers(1, 64))
    others = draw(st.lists(st.tuples(RULES, st.integers(0, 3000)), max_size=4))
    kinds = [(KeepAll(), draw(st.integers(0, 3000))), *others]
    grows = [row for rule, row in kinds if not isinstance(rule, KeepLive)]
    assume(any(grows))
    groups = tuple(group(i, rule, row, page) for i, (rule, row) in enumerate(kinds))
    return CacheSpec(page_tokens=page, groups=groups)


def least_bytes(spec: CacheSpec, load: ExpectedLoad) -> int:
    tokens = min(load.chunk_tokens, load.max_model_len)
    return device_bytes(spec, pages_beside(spec, -(-tokens // spec.page_tokens) + 1, load))


@settings(deadline=None)
@given(specs(), LOADS, st.integers(0, 10**8))
def test_the_device_budget_is_used_up_and_never_exceeded(
    spec: CacheSpec, load: ExpectedLoad, spare: int
) -> None:
    budget = least_bytes(spec, load) + spare
    pages = device_pages(spec, budget, load)
    used = device_bytes(spec, pages)
    slack = sum(g.page_bytes for g in spec.groups)
    assert used <= budget
    assert used + slack > budget


@settings(deadline=None)
@given(specs(), LOADS, st.integers(0, 10**7), st.integers(0, 10**7))
def test_more_bytes_never_mean_fewer_pages_of_any_group(
    spec: CacheSpec, load: ExpectedLoad, spare: int, more: int
) -> None:
    budget = least_bytes(spec, load) + spare
    less, greater = (device_pages(spec, b, load) for b in (budget, budget + more))
    assert all(a <= b for a, b in zip(less, greater, strict=True))


@settings(deadline=None)
@given(specs(), LOADS, st.integers(0, 10**6))
def test_no_group_has_more_pages_than_the_anchor_and_each_has_one(
    spec: CacheSpec, load: ExpectedLoad, spare: int
) -> None:
    pages = device_pages(spec, least_bytes(spec, load) + spare, load)
    assert 1 <= min(pages) <= max(pages) == pages[0]


@settings(deadline=None)
@given(specs(), LOADS)
def test_the_least_that_would_do_is_named_and_does(spec: CacheSpec, load: ExpectedLoad) -> None:
    least = least_bytes(spec, load)
    assume(least > 0)
    with pytest.raises(ConfigError, match="--device-memory") as refused:
        device_pages(spec, least - 1, load)
    named = re.search(r"allowed is (\d+) bytes", str(refused.value))
    assert named is not None
    assert int(named[1]) == least
    anchor = device_pages(spec, least, load)[0]
    assert anchor * spec.page_tokens >= min(load.chunk_tokens, load.max_model_len) + 1


def test_a_window_group_gets_its_live_pages_and_four_windows_per_chat() -> None:
    page, window = 16, 64
    pieces = (group(0, KeepAll(), 8, page), group(1, KeepWindow(window), 8, page))
    spec = CacheSpec(page_tokens=page, groups=pieces)
    load = ExpectedLoad(max_running=4, max_model_len=10**6, chunk_tokens=128, chat_tokens=2048)
    live = 4 * ((64 + 128) // 16 + 1)
    # 65,536 anchor tokens are 32 chats of 4 windows of 4 pages.
    assert pages_beside(spec, 65536 // 16, load) == (4096, live + 32 * 4 * 4)
    assert pages_beside(spec, 7, load) == (7, 7)
    short = ExpectedLoad(max_running=4, max_model_len=32, chunk_tokens=128, chat_tokens=2048)
    assert pages_beside(spec, 4096, short) == (4096, 4 * 2 + 512)


@settings(deadline=None)
@given(specs(), LOADS, st.integers(1, 2000))
def test_one_anchor_page_more_costs_at_most_one_page_of_every_group(
    spec: CacheSpec, load: ExpectedLoad, anchor: int
) -> None:
    less, more = (pages_beside(spec, n, load) for n in (anchor, anchor + 1))
    assert all(a <= b <= a + 1 for a, b in zip(less, more, strict=True))


def test_state_and_live_groups_are_sized_by_requests_and_snapshots() -> None:
    page = 16
    rules = (KeepAll(), KeepBoundary(), KeepLive())
    spec = CacheSpec(
        page_tokens=page, groups=tuple(group(i, r, 8, page) for i, r in enumerate(rules))
    )
    assert pages_beside(spec, 4096, LOAD) == (4096, 2 * 4 + 32 * 4, 4)
    # 256 pages hold 2 chats, so 2 of the 4 requests are counted on.
    assert pages_beside(spec, 256, LOAD) == (256, 2 * 2 + 2 * 4, 2)
    assert pages_beside(spec, 8, LOAD) == (8, 2, 1)


@pytest.mark.parametrize(
    ("ratio", "eighths"), [(0, 8), (1, 8), (2, 11), (4, 16), (9, 24), (16, 32), (99, 32)]
)
def test_the_dearer_a_checkpoint_the_fewer_per_chat(ratio: int, eighths: int) -> None:
    """A conversation takes ``ratio`` times the bytes of a checkpoint: four pages of the window and
    one state, 1 KiB each."""
    page = 16
    groups = (
        group(0, KeepAll(), ratio, page),
        group(1, KeepWindow(4 * page), 16, page),
        group(2, KeepBoundary(), 1024, page),
        group(3, KeepLive(), 10**6, page),
    )
    spec = CacheSpec(page_tokens=page, groups=groups)
    assert checkpoint_parts(spec, 2048) == eighths
    load = ExpectedLoad(max_running=4, max_model_len=10**6, chunk_tokens=128, chat_tokens=2048)
    _, window, states, _ = pages_beside(spec, 128 * 80, load)
    assert window == 4 * (4 + 9) + 4 * 10 * eighths
    assert states == 4 * 2 + 10 * eighths


def test_checkpoints_that_take_no_bytes_are_as_many_as_serve() -> None:
    spec = CacheSpec(page_tokens=16, groups=(group(0, KeepAll(), 8, 16),))
    assert checkpoint_parts(spec, 2048) == 32


def test_a_window_reaches_no_further_back_than_its_conversation() -> None:
    groups = (group(0, KeepAll(), 80, 16), group(1, KeepWindow(10**6), 20, 16))
    spec = CacheSpec(page_tokens=16, groups=groups)
    assert checkpoint_parts(spec, 2048) == 16


def states_and_scratch(row: int = 8) -> CacheSpec:
    rules = (KeepAll(), KeepWindow(64), KeepBoundary(), KeepLive())
    return CacheSpec(
        page_tokens=16, groups=tuple(group(i, r, row, 16) for i, r in enumerate(rules))
    )


def test_who_keeps_requests_from_running_is_named_with_what_would_do() -> None:
    load = ExpectedLoad(max_running=8, max_model_len=4096, chunk_tokens=256)
    spec = states_and_scratch()
    pages = pages_beside(spec, 384, load)
    assert pages[2:] == (2 * 3 + 3 * 4, 3)
    found = shortage(spec, pages, load)
    # 8 chats of 128 pages are where 8 requests are counted on.
    enough = device_bytes(spec, pages_beside(spec, 1024, load))
    assert found == Shortage(running=3, group="g3", pages=3, live=1, device_bytes=enough)
    assert shortage(spec, device_pages(spec, enough, load), load) is None
    assert shortage(spec, device_pages(spec, enough - 1, load), load) is not None
    no_scratch = CacheSpec(page_tokens=16, groups=spec.groups[:3])
    few = shortage(no_scratch, (20, 20, 11), load)
    assert few is not None
    assert (few.running, few.group, few.pages, few.live) == (5, "g2", 11, 2)
    # Room for checkpoints is room to run: fewer than 8 chats are enough here.
    least = few.device_bytes
    assert least < device_bytes(no_scratch, pages_beside(no_scratch, 1024, load))
    assert shortage(no_scratch, device_pages(no_scratch, least, load), load) is None
    assert shortage(no_scratch, device_pages(no_scratch, least - 1, load), load) is not None


@settings(deadline=None)
@given(specs(), LOADS, st.integers(0, 10**6))
def test_the_memory_that_is_named_lets_all_of_them_run(
    spec: CacheSpec, load: ExpectedLoad, spare: int
) -> None:
    pages = device_pages(spec, least_bytes(spec, load) + spare, load)
    found = shortage(spec, pages, load)
    stateful = [g.id for g in spec.groups if g.stateful]
    if found is None:
        assert all(pages[g] >= load.max_running for g in stateful)
        return
    assert 1 <= found.running < load.max_running
    assert found.running == found.pages // found.live
    assert shortage(spec, device_pages(spec, found.device_bytes, load), load) is None


def test_a_group_without_bytes_costs_nothing_and_has_pages() -> None:
    page = 16
    spec = CacheSpec(
        page_tokens=page,
        groups=(group(0, KeepAll(), 0, page), group(1, KeepBoundary(), 1000, page)),
    )
    anchor, state = device_pages(spec, 100_000, LOAD)
    assert state == 100
    # 92 chats of a snapshot beside 4 x 2 live slots; what is free never refuses a request.
    assert anchor == 92 * 2048 // page + 127
    longer = ExpectedLoad(max_running=4, max_model_len=10**6 + 1, chunk_tokens=256)
    ids = device_pages(spec, 100_000, longer)
    assert ids == (4 * (10**6 // page + 1), 100)
    assert {type(n) for n in ids} == {int}


def test_there_are_never_more_pages_than_ids() -> None:
    load = ExpectedLoad(max_running=4, max_model_len=10**9, chunk_tokens=256)
    one, none = (CacheSpec(page_tokens=1, groups=(group(0, KeepAll(), row, 1),)) for row in (1, 0))
    assert device_pages(one, 10**11, load) == device_pages(none, 10**11, load) == (2**31 - 1,)
    for budget in (HostRatio(3), HostMemory(10**12)):
        assert host_pages(one, (2**30,), budget, 10**15) == (2**31 - 1,)


def live_only(spec: CacheSpec, pages: Sequence[int]) -> tuple[int, ...]:
    return tuple(n if g.scratch else 0 for n, g in zip(pages, spec.groups, strict=True))


@settings(deadline=None)
@given(specs(), LOADS, st.integers(0, 10**6), st.floats(0.5, 50))
def test_scratch_is_never_more_than_requests_can_hold(
    spec: CacheSpec, load: ExpectedLoad, spare: int, ratio: float
) -> None:
    device = device_pages(spec, least_bytes(spec, load) + spare, load)
    size = int(host_bytes(spec, device) * ratio)
    budgets = (HostRatio(ratio), HostMemory(size), HostAuto())
    for budget in budgets if ratio >= 1 else (HostAuto(),):
        host = host_pages(spec, device, budget, GENEROUS)
        for g, here, there in zip(spec.groups, host, device, strict=True):
            assert not g.scratch or here <= there <= load.max_running
    for g, there in zip(spec.groups, device, strict=True):
        if isinstance(g.retention, KeepBoundary):  # two per request, and the tree's
            assert there <= 2 * load.max_running + device[0]


def test_a_model_that_caches_nothing_has_no_budget() -> None:
    spec = CacheSpec(
        page_tokens=16, groups=(group(0, KeepAll(), 0, 16), group(1, KeepLive(), 8, 16))
    )
    with pytest.raises(AssertionError, match="a model that caches nothing has no budget"):
        host_pages(spec, (4, 4), HostMemory(1000), GENEROUS)


def test_bytes_that_scratch_cannot_use_go_to_the_others() -> None:
    page, rules = 16, (KeepAll(), KeepLive())
    groups = tuple(
        group(i, r, row, page) for i, (r, row) in enumerate(zip(rules, (8, 1280), strict=True))
    )
    spec = CacheSpec(page_tokens=page, groups=groups)
    device = (90, 1)  # 11,520 bytes and 1,280
    assert host_pages(spec, device, HostMemory(12_800), GENEROUS) == (90, 1)
    assert host_pages(spec, device, HostMemory(128_000), GENEROUS) == (990, 1)
    assert host_pages(spec, device, HostRatio(10), GENEROUS) == (900, 1)
    assert host_pages(spec, device, HostAuto(), GENEROUS) == (180, 1)
    limited = host_pages(spec, device, HostAuto(), 20_003)  # 16,002 bytes
    assert (limited, {type(n) for n in limited}) == ((115, 1), {int})


def test_a_host_smaller_than_the_device_keeps_a_page_of_scratch() -> None:
    page = 16
    spec = CacheSpec(
        page_tokens=page, groups=(group(0, KeepAll(), 8, page), group(1, KeepLive(), 1280, page))
    )
    device = (90, 1)
    assert host_pages(spec, device, HostMemory(6_400), GENEROUS) == (40, 1)
    assert host_pages(spec, device, HostRatio(0.5), GENEROUS) == (45, 1)
    assert host_pages(spec, device, HostAuto(), 8_000) == (40, 1)
    assert host_pages(spec, (90, 3), HostRatio(0.5), GENEROUS) == (45, 2)
    with pytest.raises(ConfigError, match="too little for one page of group 'g0'"):
        host_pages(spec, device, HostMemory(1_300), GENEROUS)


@settings(deadline=None)
@given(specs(), LOADS, st.floats(0.01, 1))
def test_a_small_host_is_never_exceeded(spec: CacheSpec, load: ExpectedLoad, share: float) -> None:
    device = device_pages(spec, least_bytes(spec, load) * 2, load)
    size = int(host_bytes(spec, device) * share)
    try:
        host = host_pages(spec, device, HostMemory(size), GENEROUS)
    except ConfigError:
        return
    assert host_bytes(spec, host) <= size
    assert all(here <= there for here, there in zip(host, device, strict=True))


@settings(deadline=None)
@given(specs(), LOADS, st.integers(0, 10**6), st.integers(0, 10**8))
def test_host_memory_is_split_as_the_device_is_and_never_exceeded(
    spec: CacheSpec, load: ExpectedLoad, spare: int, size: int
) -> None:
    device = device_pages(spec, least_bytes(spec, load) + spare, load)
    mirror = host_bytes(spec, device)
    size += mirror  # so that no group is left without a page
    host = host_pages(spec, device, HostMemory(size), GENEROUS)
    slack = sum(g.host_stride_bytes for g in spec.groups)
    assert size - slack < host_bytes(spec, host) <= size
    scratch = host_bytes(spec, live_only(spec, device))
    for g, here, there in zip(spec.groups, host, device, strict=True):
        shared = there if g.scratch else there * (size - scratch) // (mirror - scratch)
        assert here == shared
    again = host_pages(spec, device, HostMemory(size + 1000), GENEROUS)
    assert all(a <= b for a, b in zip(host, again, strict=True))


@settings(deadline=None)
@given(specs(), st.floats(1, 8))
def test_a_host_ratio_is_int_of_device_pages_times_ratio(spec: CacheSpec, ratio: float) -> None:
    device = device_pages(spec, least_bytes(spec, LOAD), LOAD)
    host = host_pages(spec, device, HostRatio(ratio), GENEROUS)
    assert host == tuple(
        n if g.scratch else int(n * ratio) for n, g in zip(device, spec.groups, strict=True)
    )


@settings(deadline=None)
@given(specs(), st.integers(0, 10**8))
def test_by_default_twice_the_device_or_what_fits_four_fifths_of_free_memory(
    spec: CacheSpec, free: int
) -> None:
    device = device_pages(spec, least_bytes(spec, LOAD), LOAD)
    host = host_pages(spec, device, HostAuto(), free)
    twice = tuple(n if g.scratch else 2 * n for n, g in zip(device, spec.groups, strict=True))
    assert host_bytes(spec, host) <= free * 4 // 5
    if host_bytes(spec, twice) <= free * 4 // 5:
        assert host == twice
    assert all(host) or not any(host)


PAIR = CacheSpec(
    page_tokens=16,
    groups=(group(0, KeepAll(), 100, 16), group(1, KeepWindow(64), 30, 16)),
)


@pytest.mark.parametrize("budget", [HostMemory(0), HostRatio(0.0)])
def test_zero_turns_the_host_tier_off(budget: HostMemory | HostRatio) -> None:
    assert host_pages(PAIR, (100, 60), budget, 0) == (0, 0)


@pytest.mark.parametrize(
    ("budget", "free", "message"),
    [
        (HostMemory(10**6), 10**5, r"--host-memory 976.* KiB: .* are needed and .* are free"),
        (HostRatio(2.5), 1000, r"--host-ratio 2.5: .* are needed and 1000 B are free"),
        (HostMemory(1000), 10**9, "--host-memory 1000 B: too little for one page of group 'g0'"),
        (HostRatio(0.01), 10**9, "--host-ratio 0.01: too little for one page of group 'g1'"),
    ],
)
def test_a_host_budget_that_cannot_be_met_is_refused(
    budget: HostMemory | HostRatio, free: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        host_pages(PAIR, (100, 60), budget, free)


def test_either_host_flag_or_neither_is_a_budget() -> None:
    assert host_budget("4GiB", None) == HostMemory(4 * 2**30)
    assert host_budget(None, 1.5) == HostRatio(1.5)
    assert host_budget(None, None) == HostAuto()


@pytest.mark.parametrize("ratio", [-0.1, float("nan"), float("inf")])
def test_an_impossible_ratio_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="host ratio"):
        host_budget(None, ratio)


def test_impossible_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--host-memory -3GiB"):
        host_budget("-3GiB", None)
    with pytest.raises(ValueError, match="-1 bytes of the host"):
        HostMemory(-1)


@pytest.mark.parametrize("field", ["max_running", "max_model_len", "chunk_tokens", "chat_tokens"])
def test_an_empty_load_is_refused_naming_the_field(field: str) -> None:
    sizes = {"max_running": 1, "max_model_len": 1, "chunk_tokens": 1, "chat_tokens": 1, field: 0}
    with pytest.raises(ValueError, match=f"{field} 0"):
        ExpectedLoad(**sizes)


def test_the_table_is_what_the_pools_allocate() -> None:
    device, host = (7, 5), (14, 9)
    table = BudgetTable.of(PAIR, device, host)
    pools = DevicePools(PAIR, device)
    arenas = [HostArena(g, n) for g, n in zip(PAIR.groups, host, strict=True)]
    assert table.device_bytes == pools.size_bytes == device_bytes(PAIR, device)
    assert table.host_bytes == sum(a.bytes.nbytes for a in arenas) == host_bytes(PAIR, host)
    layouts = [HostPageLayout.of(g) for g in PAIR.groups]
    assert [row.padding_bytes for row in table.groups] == [
        layout.stride_bytes - layout.page_bytes for layout in layouts
    ]
    assert [g.host_stride_bytes for g in PAIR.groups] == [la.stride_bytes for la in layouts]


TABLE = """\
pages of 16 tokens, 100 bytes per token kept
group  keeps                      token  page  padding      device                    host
g0     every token                  100  1600        0  1024 pages    1.56 MiB  2048 pages    3.12 MiB
  b    1 layer, 16 x [100] uint8    100  1600                         1.56 MiB                3.12 MiB
g1     last 64 tokens                30   480       32   600 pages  281.25 KiB  1200 pages     600 KiB
  b    1 layer, 16 x [30] uint8      30   480                       281.25 KiB              562.50 KiB
total                                                                 1.84 MiB                3.71 MiB"""  # noqa: E501


def test_the_table_reads_as_one_line_per_group_and_buffer() -> None:
    text = BudgetTable.of(PAIR, (1024, 600), (2048, 1200)).render()
    assert text == TABLE


ALL_RULES_TABLE = """\
pages of 16 tokens, 65.50 bytes per token kept
group      keeps                            token  page  padding    device                 host
anchor     every token                      65.50  1048       40  10 pages  10.23 KiB  20 pages  21.25 KiB
  k        2 layers, 16 x [2 x 8] bfloat16     64  1024                        10 KiB               20 KiB
  c4       1 layer, 1 x [24] uint8           1.50    24                         240 B                480 B
chunk      chunk of 32 tokens                   3    48       16   4 pages      192 B   8 pages      512 B
  k        1 layer, 16 x [3] uint8              3    48                         192 B                384 B
state      snapshots                            -    80       48   3 pages      240 B   6 pages      768 B
  conv     1 layer, 1 x [5 x 4] float32         -    80                         240 B                480 B
open       running requests                     -    24       40   2 pages       48 B   2 pages      128 B
  c4_open  1 layer, 1 x [2 x 4 x 3] uint8       -    24                          48 B                 48 B
total                                                                       10.70 KiB            22.62 KiB"""  # noqa: E501


def buffer(name: str, layers: int, rows: int, shape: tuple[int, ...], dtype: str) -> BufferSpec:
    ids = tuple(LayerId(layer) for layer in range(layers))
    return BufferSpec(name=name, layers=ids, rows_per_page=rows, row_shape=shape, dtype=dtype)


def test_the_table_names_every_rule_and_shape() -> None:
    kinds: list[tuple[str, Retention, tuple[BufferSpec, ...]]] = [
        ("anchor", KeepAll(), (
            buffer("k", 2, 16, (2, 8), "bfloat16"), buffer("c4", 1, 1, (24,), "uint8"),
        )),
        ("chunk", KeepChunk(32), (buffer("k", 1, 16, (3,), "uint8"),)),
        ("state", KeepBoundary(), (buffer("conv", 1, 1, (5, 4), "float32"),)),
        ("open", KeepLive(), (buffer("c4_open", 1, 1, (2, 4, 3), "uint8"),)),
    ]  # fmt: skip
    groups = tuple(
        CacheGroup(id=GroupId(i), name=name, retention=rule, buffers=buffers)
        for i, (name, rule, buffers) in enumerate(kinds)
    )
    spec = CacheSpec(page_tokens=16, groups=groups)
    assert BudgetTable.of(spec, (10, 4, 3, 2), (20, 8, 6, 2)).render() == ALL_RULES_TABLE


def test_the_figures_are_the_tables_and_add_up() -> None:
    figures = dict(BudgetTable.of(PAIR, (1024, 600), (2048, 1200)).figures())
    groups = figures.pop("groups")
    assert figures == {
        "page_tokens": 16, "token_bytes": 100, "device_bytes": 1926400, "host_bytes": 3891200,
    }  # fmt: skip
    assert isinstance(groups, list)
    assert groups[1] == {
        "name": "g1", "rule": "last 64 tokens", "page_bytes": 480, "padding_bytes": 32,
        "token_bytes": 30, "device_pages": 600, "host_pages": 1200, "device_bytes": 288000,
        "host_bytes": 614400,
        "buffers": ({
            "name": "b", "layers": 1, "rows_per_page": 16, "row_shape": (30,), "dtype": "uint8",
            "row_bytes": 30, "page_bytes": 480, "token_bytes": 30, "device_bytes": 288000,
            "host_bytes": 576000,
        },),
    }  # fmt: skip


def test_a_state_has_no_bytes_per_token() -> None:
    spec = CacheSpec(
        page_tokens=16, groups=(group(0, KeepAll(), 9, 16), group(1, KeepBoundary(), 9, 16))
    )
    table = BudgetTable.of(spec, (5, 5), (10, 10))
    assert [row.token_bytes for row in table.groups] == [9, None]
    assert [row.buffers[0].token_bytes for row in table.groups] == [9, None]


def test_a_group_without_bytes_says_so() -> None:
    spec = CacheSpec(
        page_tokens=4, groups=(group(0, KeepAll(), 0, 4), group(1, KeepBoundary(), 9, 4))
    )
    table = BudgetTable.of(spec, (5, 5), (10, 10))
    assert table.token_bytes == 0
    assert "every token (no bytes)" in table.render()
    assert (table.device_bytes, table.host_bytes) == (45, 640)

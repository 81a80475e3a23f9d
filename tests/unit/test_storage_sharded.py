"""Pages written by some ranks are found by other numbers of them, and by nobody else."""

import numpy as np
import pytest

from stratakv.core.ids import GroupId, PageKey
from stratakv.spec.derive import spec_of
from stratakv.spec.sharding import sharding_of
from stratakv.storage.backend import (
    Everything,
    ObjectKey,
    ReadStatus,
    StoreFormat,
    WriteStatus,
)
from stratakv.storage.memory import MemoryBackend
from stratakv.storage.sharded import ShardedBackend

NEXT = {
    "model_type": "qwen3_next", "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 4, "hidden_size": 64, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
CUT = 8
WHOLE = spec_of(NEXT, page_tokens=4, dtype="float32")
HEADS, STATE = GroupId(0), GroupId(1)
KEYS = [PageKey(bytes([at]) * 32) for at in range(3)]


@pytest.fixture
def store():
    stored = sharding_of(NEXT, WHOLE, 1).stored(CUT)
    sizes = tuple(group.page_bytes for group in stored.groups)
    return MemoryBackend(StoreFormat(spec_digest=stored.digest, page_bytes=sizes))


def rank_of(store, rank, ranks):
    sharding = sharding_of(NEXT, WHOLE, ranks)
    backend = ShardedBackend.of(store, sharding, rank, CUT)
    return backend, [group.page_bytes for group in sharding.spec.groups]


def whole_pages(group):
    random = np.random.default_rng(group)
    size = WHOLE.groups[group].page_bytes
    return [random.integers(0, 256, size, np.uint8) for _ in KEYS]


def share(page, group, rank, ranks):
    """What a rank has of a page: of every row, its heads."""
    if group == STATE:
        return page.tobytes()
    parts, at = [], 0
    for buffer in WHOLE.groups[group].buffers:
        size = buffer.page_bytes
        heads = page[at : at + size].reshape(-1, ranks, buffer.row_bytes // ranks)
        parts.append(heads[:, rank].tobytes())
        at += size
    return b"".join(parts)


def names(group):
    return [ObjectKey(key, group) for key in KEYS]


def write(store, ranks, group):
    for rank in range(ranks):
        backend, _ = rank_of(store, rank, ranks)
        pages = [memoryview(share(page, group, rank, ranks)) for page in whole_pages(group)]
        backend.write(names(group), pages)


def read(store, rank, ranks, group):
    backend, sizes = rank_of(store, rank, ranks)
    rooms = [bytearray(sizes[group]) for _ in KEYS]
    statuses = backend.read(names(group), list(map(memoryview, rooms)))
    return statuses, list(map(bytes, rooms))


@pytest.mark.parametrize("group", [HEADS, STATE])
@pytest.mark.parametrize("writers", [1, 2, 4, 8])
@pytest.mark.parametrize("readers", [1, 2, 4, 8])
def test_any_number_of_ranks_finds_what_any_number_wrote(store, writers, readers, group):
    write(store, writers, group)
    for rank in range(readers):
        statuses, found = read(store, rank, readers, group)
        assert statuses == [ReadStatus.HIT] * 3
        assert found == [share(page, group, rank, readers) for page in whole_pages(group)]
        assert rank_of(store, rank, readers)[0].contains(names(group)).all()


def test_what_all_ranks_have_alike_is_stored_once(store):
    backend, _ = rank_of(store, 1, 2)
    pages = [memoryview(page.tobytes()) for page in whole_pages(STATE)]
    assert backend.write(names(STATE), pages) == [WriteStatus.PRESENT] * 3
    assert not backend.contains(names(STATE)).any()


def test_a_page_lacks_a_slice_and_is_missed_by_whoever_needs_it(store):
    write(store, 4, HEADS)
    second = sharding_of(NEXT, WHOLE, 4).objects(HEADS, 1, CUT)[0]
    assert store.remove([ObjectKey(KEYS[1], HEADS, second.number)]) == 1
    for rank, hits in ((0, [True, False, True]), (1, [True] * 3)):
        backend, _ = rank_of(store, rank, 2)
        assert backend.contains(names(HEADS)).tolist() == hits
        statuses, _ = read(store, rank, 2, HEADS)
        assert [status is ReadStatus.HIT for status in statuses] == hits


def test_a_damaged_slice_is_a_damaged_page(store):
    write(store, 2, HEADS)
    last = sharding_of(NEXT, WHOLE, 2).objects(HEADS, 0, CUT)[-1]
    store.damage(ObjectKey(KEYS[0], HEADS, last.number), 3)
    assert read(store, 0, 1, HEADS)[0] == [ReadStatus.CORRUPT, ReadStatus.HIT, ReadStatus.HIT]


def test_a_page_that_was_there_is_present_and_one_that_lacked_a_slice_is_stored(store):
    write(store, 1, HEADS)
    backend, _ = rank_of(store, 0, 1)
    pages = [memoryview(page.tobytes()) for page in whole_pages(HEADS)]
    assert backend.write(names(HEADS), pages) == [WriteStatus.PRESENT] * 3
    store.remove(
        [ObjectKey(KEYS[2], HEADS, sharding_of(NEXT, WHOLE, 1).objects(HEADS, 0, CUT)[5].number)]
    )
    assert backend.write(names(HEADS), pages)[2] is WriteStatus.STORED


def test_removal_takes_every_slice(store):
    write(store, 2, HEADS)
    backend, _ = rank_of(store, 0, 1)
    assert backend.remove(names(HEADS)[:1]) == CUT
    assert backend.contains(names(HEADS)).tolist() == [False, True, True]
    backend.remove(Everything.EVERYTHING)
    assert not backend.contains(names(HEADS)).any()
    assert backend.contains([]).tolist() == []


class Touched:
    """What a store hears as used."""

    def __init__(self):
        self.keys = []

    def touch(self, keys):
        self.keys += keys


def test_what_all_ranks_have_alike_is_touched_once_and_a_slice_by_whoever_has_it():
    touched = {}
    for rank in range(2):
        touched[rank] = touches = Touched()
        rank_of(touches, rank, 2)[0].touch([*names(HEADS)[:1], *names(STATE)[:1]])
    first, second = (
        {(key.group, key.shard) for key in touches.keys} for touches in touched.values()
    )
    assert len(touched[1].keys) == len(second) == CUT // 2
    assert first & second == set()
    assert {group for group, _ in first - second} == {HEADS, STATE}
    assert {group for group, _ in second} == {HEADS}


def test_a_rank_removes_what_it_did_not_write_too(store):
    """A page is taken back on the word of any rank."""
    write(store, 2, STATE)
    backend, _ = rank_of(store, 1, 2)
    assert backend.remove(names(STATE)[:1]) == 1

"""What all remote backends share: names, batches, headers."""

import numpy as np
import pytest

from stratakv.core.ids import GroupId, PageKey
from stratakv.storage.backend import ObjectKey, StoreFormat
from stratakv.storage.header import HEADER_BYTES, is_sound, payload_hash
from stratakv.storage.remote_object import (
    are_genuine,
    batches,
    blank_heads,
    head_views,
    name_of,
    seal_head,
    unsealed_heads,
)

FORM = StoreFormat(spec_digest=bytes(range(16)), page_bytes=(64, 96))
KEY = ObjectKey(PageKey(bytes(range(32))), GroupId(1), 3)


def test_a_name_has_the_spec_the_group_the_page_and_the_shard():
    assert name_of(KEY, FORM) == f"{bytes(range(16)).hex()}/1/{bytes(range(32)).hex()}.3"


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([], []),
        ([9], [(0, 1)]),
        ([2, 2, 2], [(0, 2), (2, 3)]),
        ([1, 9, 1], [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_a_batch_is_bounded_in_bytes_and_never_empty(sizes, found):
    assert [(at.start, at.stop) for at in batches(sizes, 4)] == found


def sealed_heads(keys, form, pages):
    """As a store sends them, one after the other."""
    table = unsealed_heads(keys, form)
    for head, page in zip(head_views(table), pages, strict=True):
        seal_head(head, page)
    return table


def test_a_sealed_head_is_the_common_header():
    page = memoryview(b"p" * 96)
    heads = sealed_heads([KEY], FORM, [page])
    assert is_sound(heads).all()
    (found,) = heads
    assert (found["page"].tobytes(), found["group"], found["shard"]) == (*KEY,)
    assert found["spec"].tobytes() == FORM.spec_digest
    assert (found["payload_bytes"], found["payload_hash"]) == (96, payload_hash(page))
    assert found["stored_ns"] > 0


def test_one_flipped_bit_anywhere_in_a_head_is_not_genuine():
    page = memoryview(b"p" * 96)
    hashes = [payload_hash(page)]
    sound = sealed_heads([KEY], FORM, [page])
    assert are_genuine([KEY], FORM, sound, hashes).all()
    for bit in range(HEADER_BYTES * 8):
        heads = sound.copy()
        head_views(heads)[0][bit // 8] ^= 1 << (bit % 8)
        assert not are_genuine([KEY], FORM, heads, hashes).any(), f"bit {bit}"


def test_a_head_belongs_to_its_key_its_spec_and_its_payload():
    page = memoryview(b"p" * 96)
    heads, hashes = sealed_heads([KEY], FORM, [page]), [payload_hash(page)]
    others = [
        ObjectKey(PageKey(bytes(32)), KEY.group, KEY.shard),
        ObjectKey(KEY.page, GroupId(0), KEY.shard),
        ObjectKey(KEY.page, KEY.group, 4),
    ]
    for other in others:
        assert not are_genuine([other], FORM, heads, hashes).any()
    wrong_spec = StoreFormat(spec_digest=bytes(16), page_bytes=FORM.page_bytes)
    wrong_size = StoreFormat(spec_digest=FORM.spec_digest, page_bytes=(64, 97))
    assert not are_genuine([KEY], wrong_spec, heads, hashes).any()
    assert not are_genuine([KEY], wrong_size, heads, hashes).any()
    assert not are_genuine([KEY], FORM, heads, [hashes[0] ^ 1]).any()
    assert not are_genuine([KEY], FORM, blank_heads(1), [0]).any()


def test_no_objects_are_no_headers():
    assert are_genuine([], FORM, blank_heads(0), []).tolist() == []
    assert head_views(sealed_heads([], FORM, [])) == []


def test_head_views_share_memory_with_the_table():
    heads = blank_heads(2)
    head_views(heads)[1][:4] = np.uint32(7).tobytes()
    assert heads["magic"].tolist() == [0, 7]

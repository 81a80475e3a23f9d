import struct

import numpy as np

from stratakv.core.ids import GroupId, PageKey
from stratakv.storage.backend import ObjectKey
from stratakv.storage.header import (
    HEADER,
    HEADER_BYTES,
    QUARANTINED,
    headers_of,
    is_blank,
    is_sound,
    payload_hash,
    seal,
)

KEY = ObjectKey(PageKey(bytes(range(32))), GroupId(3), 7)
SPEC = b"0123456789abcdef"
OTHER = {"magic": [0, 1], "version": [0, 2]}
"""Values that no header of this version has."""


def sample():
    table = headers_of([KEY], SPEC)
    table["payload_bytes"], table["payload_hash"], table["stored_ns"] = 2**40, 2**64 - 1, 2**62
    return seal(table)


def test_a_header_has_128_bytes_in_the_documented_order():
    data = sample().tobytes()
    assert len(data) == HEADER_BYTES == 128
    *fields, checksum = struct.unpack("<4sI16s32sIIQQQ32sQ", data)
    of_payload = (2**40, 2**64 - 1, 2**62)
    assert fields == [b"SKVO", 1, SPEC, KEY.page, 3, 7, *of_payload, bytes(32)]
    assert checksum == payload_hash(data[:120])


def test_every_flipped_bit_is_seen():
    data = sample().tobytes()
    flipped = [
        bytes(data[:at]) + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
        for at in range(HEADER_BYTES)
        for bit in range(8)
    ]
    table = np.frombuffer(b"".join([*flipped, data]), HEADER)
    assert is_sound(table).tolist() == [False] * len(flipped) + [True]


def test_what_is_sealed_and_of_nobody_s_version_is_not_sound():
    for field, values in OTHER.items():
        for value in values:
            table = sample()
            table[field] = value
            assert not is_sound(seal(table)).any(), field


def test_a_quarantined_object_is_sound():
    table = sample()
    table["magic"] = QUARANTINED
    assert is_sound(seal(table)).all()


def test_blank_is_all_zeros():
    table = np.zeros(3, HEADER)
    table["zeros"][1, 3] = 1
    assert is_blank(table).tolist() == [True, False, True]
    assert is_blank(table[:0]).tolist() == []


def test_the_payload_hash_is_xxh3_64():
    assert payload_hash(b"") == 0x2D06800538D394C2
    assert payload_hash(memoryview(b"stratakv")) != payload_hash(b"stratakw")

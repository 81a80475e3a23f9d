import numpy as np
import pytest

from stratakv.core.ids import GroupId, PageKey
from stratakv.storage.backend import ObjectKey
from stratakv.storage.header import (
    HEADER,
    HEADER_BYTES,
    QUARANTINED,
    HeaderError,
    HeaderFault,
    ObjectHeader,
    headers_of,
    is_blank,
    is_sound,
    payload_hash,
    seal,
)

KEY = ObjectKey(PageKey(bytes(range(32))), GroupId(3), 7)
SAMPLE = ObjectHeader(
    key=KEY, spec_digest=b"0123456789abcdef", payload_bytes=2**40, payload_hash=2**64 - 1,
    stored_ns=2**62,
)  # fmt: skip


def test_a_header_is_128_bytes_and_comes_back_as_it_was():
    data = SAMPLE.pack()
    assert len(data) == HEADER_BYTES == 128
    assert data[:4] == b"SKVO"
    assert ObjectHeader.unpack(data) == SAMPLE


def test_every_flipped_bit_is_seen_alone_and_in_a_table():
    data = SAMPLE.pack()
    flipped = [
        bytes(data[:at]) + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
        for at in range(HEADER_BYTES)
        for bit in range(8)
    ]
    for bad in flipped:
        with pytest.raises(HeaderError):
            ObjectHeader.unpack(bad)
    table = np.frombuffer(b"".join([*flipped, data]), HEADER)
    assert is_sound(table).tolist() == [False] * len(flipped) + [True]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", HeaderFault.SIZE),
        (SAMPLE.pack() + b"x", HeaderFault.SIZE),
        (bytes(128), HeaderFault.MAGIC),
        (SAMPLE.pack()[:4] + b"\x02" + SAMPLE.pack()[5:], HeaderFault.VERSION),
        (SAMPLE.pack()[:-1] + b"\0", HeaderFault.CHECKSUM),
    ],
)
def test_the_fault_is_named(data: bytes, fault: HeaderFault):
    with pytest.raises(HeaderError) as caught:
        ObjectHeader.unpack(data)
    assert caught.value.fault is fault


def test_a_quarantined_object_is_sound_but_not_usable():
    table = headers_of([KEY], SAMPLE.spec_digest)
    table["magic"] = QUARANTINED
    assert is_sound(seal(table)).all()
    with pytest.raises(HeaderError) as caught:
        ObjectHeader.unpack(table.tobytes())
    assert caught.value.fault is HeaderFault.QUARANTINED


def test_blank_is_all_zeros():
    table = np.zeros(3, HEADER)
    table["zeros"][1, 3] = 1
    assert is_blank(table).tolist() == [True, False, True]
    assert is_blank(table[:0]).tolist() == []


def test_the_payload_hash_is_xxh3_64():
    assert payload_hash(b"") == 0x2D06800538D394C2
    assert payload_hash(memoryview(b"stratakv")) != payload_hash(b"stratakw")

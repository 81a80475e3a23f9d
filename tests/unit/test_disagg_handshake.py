"""Two engines that do not fit are refused with both values."""

from dataclasses import fields, replace

import pytest

from stratakv.core.errors import TransportError
from stratakv.disagg.handshake import HANDSHAKE_BYTES, Handshake

OURS = Handshake(
    protocol=1, model="ab12", spec="cd34", page_tokens=16, dtypes=("bfloat16", "float32"),
    layout=(4096, 128), ranks=2, rank=0,
)  # fmt: skip
OTHER = {
    "protocol": 2, "model": "ef", "spec": "00", "page_tokens": 256, "dtypes": ("float32",),
    "layout": (4096, 256), "ranks": 1, "rank": 1,
}  # fmt: skip


def test_what_was_sent_is_what_is_read_and_fits_itself():
    read = Handshake.decode(OURS.encode())
    assert read == OURS
    assert OURS.refusal(read) == ""


@pytest.mark.parametrize("name", [field.name for field in fields(Handshake)])
def test_each_difference_is_refused_with_both_values(name):
    refusal = OURS.refusal(replace(OURS, **{name: OTHER[name]}))
    assert name in refusal
    assert repr(getattr(OURS, name)) in refusal
    assert repr(OTHER[name]) in refusal
    assert ";" not in refusal


def test_all_differences_are_named_at_once():
    refusal = OURS.refusal(Handshake(**OTHER))
    assert all(name in refusal for name in OTHER)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"\xff", b"[" * 9999, b" " * (HANDSHAKE_BYTES + 1),
             OURS.encode().replace(b"16", b'"x"'), OURS.encode().replace(b'"ranks"', b'"parts"')],
)  # fmt: skip
def test_what_is_none_is_refused(data):
    with pytest.raises(TransportError, match="handshake"):
        Handshake.decode(data)

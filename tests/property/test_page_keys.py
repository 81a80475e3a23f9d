"""Page keys against a definition written from the design: SHA-256(previous || int32-LE tokens)."""

import hashlib
import struct
from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratakv.core.page_keys import Namespace, PageHasher, page_keys

SPACE = Namespace(model=b"model", spec_digest=b"spec")
GOLDEN = "f7d14014ac287c3303b49e1e7b45a5f07fdea7fefcbc6af52d753b7e7270181a"
GOLDEN_ROOT = "ed45854dec5ae93b50ef17fef99b5a1501aa879ea381f0437d8d259adde01422"
GOLDEN_SECOND = "096fa3771128cbc62e3cd50dcad79f46d8c3ab867c078a41816c62c213c0dbba"
TOKEN = st.integers(-(2**31), 2**31 - 1)
TOKENS = st.lists(TOKEN, max_size=70)
PAGE = st.integers(1, 20)


def as_tokens(values: list[int]) -> npt.NDArray[np.int32]:
    return np.asarray(values, dtype=np.int32)


def by_definition(values: list[int], space: Namespace, page_tokens: int) -> list[bytes]:
    previous, keys = space.root(), []
    for at in range(0, len(values) - page_tokens + 1, page_tokens):
        page = values[at : at + page_tokens]
        previous = hashlib.sha256(previous + struct.pack(f"<{page_tokens}i", *page)).digest()
        keys.append(previous)
    return keys


@settings(deadline=None)
@given(TOKENS, PAGE)
def test_keys_are_the_chain_of_full_pages(values: list[int], page: int) -> None:
    assert page_keys(as_tokens(values), SPACE, page) == by_definition(values, SPACE, page)


@settings(deadline=None)
@given(TOKENS, PAGE, st.lists(st.integers(0, 70), max_size=6))
def test_a_prefix_hashed_in_steps_has_the_keys_of_one_hashed_at_once(
    values: list[int], page: int, cuts: list[int]
) -> None:
    hasher = PageHasher(SPACE, page)
    steps = [list(hasher.extend(as_tokens(values[:end]))) for end in (*sorted(cuts), len(values))]
    once = page_keys(as_tokens(values), SPACE, page)
    assert hasher.keys == once
    assert [key for step in steps for key in step] == once


@settings(deadline=None)
@given(st.lists(TOKEN, min_size=1, max_size=40), PAGE, st.data())
def test_a_changed_token_changes_its_page_and_every_later_one(
    values: list[int], page: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(values) - 1))
    other = values.copy()
    other[at] ^= 1
    mine, theirs = (page_keys(as_tokens(v), SPACE, page) for v in (values, other))
    assert mine[: at // page] == theirs[: at // page]
    assert not set(mine[at // page :]) & set(theirs[at // page :])


def test_a_view_with_strides_hashes_as_its_values() -> None:
    wide = np.arange(64, dtype=np.int32)
    assert page_keys(wide[::2], SPACE, 8) == page_keys(wide[::2].copy(), SPACE, 8)
    assert page_keys(wide[::2], SPACE, 8) != page_keys(wide[:32], SPACE, 8)


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.float32, np.int16])
def test_tokens_of_another_width_are_refused(dtype: type) -> None:
    with pytest.raises(TypeError, match="int32"):
        page_keys(np.zeros(4, dtype=dtype), SPACE, 2)


def test_tokens_that_are_no_array_are_refused() -> None:
    with pytest.raises(TypeError, match="tokens must be an int32 array, got a list"):
        page_keys([0, 1], SPACE, 2)


def test_no_tokens_and_less_than_a_page_have_no_keys() -> None:
    assert page_keys(as_tokens([]), SPACE, 4) == []
    assert page_keys(as_tokens([1, 2, 3]), SPACE, 4) == []


@settings(deadline=None)
@given(st.binary(max_size=6), st.binary(max_size=6), st.binary(max_size=6), st.integers(0, 6))
def test_fields_are_framed_so_bytes_cannot_move_between_them(
    model: bytes, digest: bytes, adapter: bytes, moved: int
) -> None:
    """("ab", "c") and ("a", "bc") join to the same bytes; their keys must differ."""
    one = Namespace(model=model, spec_digest=digest, adapter=adapter)
    joined = model + digest
    other = replace(one, model=joined[:moved], spec_digest=joined[moved:])
    assert (one.root() == other.root()) == (one == other)


VARIANTS = {
    "model": replace(SPACE, model=b"other"),
    "spec": replace(SPACE, spec_digest=b"other"),
    "adapter": replace(SPACE, adapter=b"lora"),
    "salt": replace(SPACE, salt="tenant"),
    "salt as adapter": replace(SPACE, adapter=b"tenant"),
    "unicode salt": replace(SPACE, salt="ténant"),
    "plain": SPACE,
}


def test_what_decides_bytes_or_readers_separates_keys() -> None:
    keys = {name: page_keys(as_tokens([1, 2, 3, 4]), s, 2)[0] for name, s in VARIANTS.items()}
    assert len(set(keys.values())) == len(VARIANTS)


BYTES = st.sampled_from([b"", b"a", b"b", b"ab", b"\0"])
NAMESPACE = st.builds(
    Namespace,
    model=BYTES,
    spec_digest=BYTES,
    adapter=BYTES,
    salt=st.sampled_from(["", "a", "b", "ab", "\0"]),
)


@settings(deadline=None)
@given(NAMESPACE, NAMESPACE, st.lists(TOKEN, min_size=2, max_size=40), st.integers(1, 3))
def test_two_namespaces_share_no_key_at_any_place(
    one: Namespace, other: Namespace, values: list[int], page: int
) -> None:
    mine, theirs = (page_keys(as_tokens(values), space, page) for space in (one, other))
    if one == other:
        assert mine == theirs
    else:
        assert not set(mine) & set(theirs)


def test_every_field_of_a_namespace_decides_every_key() -> None:
    """A field that is added and not hashed would let two namespaces meet."""
    tokens = as_tokens(list(range(24)))
    plain = page_keys(tokens, SPACE, 4)
    for field in fields(Namespace):
        value = getattr(SPACE, field.name)
        changed = replace(SPACE, **{field.name: value * 2 + type(value)(_MORE[type(value)])})
        assert not set(plain) & set(page_keys(tokens, changed, 4)), field.name


_MORE = {bytes: b"x", str: "x"}


def test_a_salt_and_an_adapter_are_set_on_their_own() -> None:
    both = SPACE.salted("s").adapted(b"digest")
    assert both == SPACE.adapted(b"digest").salted("s")
    assert both == replace(SPACE, adapter=b"digest", salt="s")


def test_a_salt_reaches_every_page_of_the_prefix() -> None:
    tokens = as_tokens(list(range(64)))
    mine, theirs = (page_keys(tokens, replace(SPACE, salt=s), 4) for s in ("a", "b"))
    assert not set(mine) & set(theirs)


def test_keys_do_not_change_from_one_release_to_the_next() -> None:
    """Stored pages are found by these bytes: a change here must come with a new ``FORMAT``."""
    key = page_keys(as_tokens([1, 2, 3, 4]), SPACE, 4)[0]
    assert key.hex() == GOLDEN
    whole = SPACE.adapted(b"\x01" * 32).salted("tén\0ant")
    assert whole.root().hex() == GOLDEN_ROOT
    assert page_keys(as_tokens(list(range(8))), whole, 4)[1].hex() == GOLDEN_SECOND

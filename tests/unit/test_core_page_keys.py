"""The chain of page keys: in C and over hashlib the same bytes, whatever the pages."""

import hashlib
import runpy
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratakv.core import page_keys
from stratakv.core.page_keys import hashlib_chain

HELPER = "stratakv.core._page_keys"
KEY = hashlib.sha256(b"before").digest()


def compiled():
    """Not built without a compiler, nor imported where the processor cannot."""
    return pytest.importorskip(HELPER, exc_type=ImportError).chain


CHAINS = {"hashlib": lambda: hashlib_chain, "c": compiled}
every_chain = pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)


@every_chain
def test_a_key_is_the_digest_of_the_key_before_it_and_of_its_page(chain):
    keys = chain()(KEY, b"a" * 64 + b"b" * 64, 64)
    first = hashlib.sha256(KEY + b"a" * 64).digest()
    assert keys == [first, hashlib.sha256(first + b"b" * 64).digest()]


@every_chain
def test_no_page_is_no_key(chain):
    assert chain()(KEY, b"", 64) == []


def test_both_chains_agree_on_every_length_of_a_page():
    """Paddings of one block and of two, and messages that end at any byte of the last."""
    chain, data = compiled(), np.random.default_rng(0).bytes(3 * 400)
    for size in range(1, 400):
        assert chain(KEY, data[: 3 * size], size) == hashlib_chain(KEY, data[: 3 * size], size)


@given(st.binary(min_size=32, max_size=32), st.integers(1, 80), st.data())
def test_both_chains_agree_on_any_bytes(key, size, draw):
    pages = draw.draw(st.integers(0, 5))
    data = draw.draw(st.binary(min_size=size * pages, max_size=size * pages))
    assert compiled()(key, data, size) == hashlib_chain(key, data, size)


@pytest.mark.parametrize(
    ("key", "data", "size"),
    [
        (KEY[:-1], b"a" * 64, 64),
        (KEY + b"a", b"a" * 64, 64),
        (KEY, b"a" * 63, 64),
        (KEY, b"a" * 64, 0),
        (KEY, b"a" * 64, -64),
        (KEY, b"", sys.maxsize),
    ],
)
def test_the_helper_refuses_what_is_no_chain(key, data, size):
    with pytest.raises(ValueError, match="needs a digest of 32 bytes, and whole pages"):
        compiled()(key, data, size)


def test_without_the_helper_hashlib_makes_the_keys(monkeypatch):
    compiled()
    monkeypatch.setitem(sys.modules, HELPER, None)
    monkeypatch.delattr(HELPER)
    fresh = runpy.run_path(str(page_keys.__file__))
    assert fresh["DEFAULT_CHAIN"] is fresh["hashlib_chain"]
    tokens = np.arange(70, dtype=np.int32)
    namespace = {"model": b"m", "spec_digest": b"s"}
    keys = fresh["page_keys"](tokens, fresh["Namespace"](**namespace), 16)
    assert len(keys) == 4
    assert keys == page_keys.page_keys(tokens, page_keys.Namespace(**namespace), 16)


def test_with_the_helper_it_is_used():
    assert page_keys.DEFAULT_CHAIN is compiled()

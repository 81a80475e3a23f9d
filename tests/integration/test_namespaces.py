"""No request hits across namespaces, on any tier: salts, adapters, both and none.

Most of it runs over ``TokenRunner``, which raises if a page holds another prefix; that the bytes
differ too is shown with real adapters in ``test_adapters``.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratakv.core.config import EngineConfig
from stratakv.core.errors import RequestError
from stratakv.core.page_keys import Namespace
from stratakv.engine.namespaces import Namespaces
from stratakv.spec.retention import KeepWindow
from tests.engines import (
    RecordingRunner,
    ended,
    evict_device,
    expected_tokens,
    greedy,
    on_device,
    on_host,
    run,
    token_engine,
    token_spec,
    tokens_of,
)

PAGE = 4
SPEC = token_spec(PAGE, KeepWindow(10))
CONFIG = EngineConfig(
    page_tokens=PAGE, max_running=8, max_model_len=128, chunk_tokens=16, step_tokens=64,
    load_back_threshold=0,
)  # fmt: skip
DIGESTS = {"x": b"x" * 32, "y": b"y" * 32, "x again": b"x" * 32}
SALTS = ("", "a", "b", "x")
SPACES = list(product(SALTS, ("", "x", "y")))
PROMPT = [i % 7 for i in range(30)]
END = 28


def engine():
    return token_engine(SPEC, CONFIG, (400, 400), (400, 400), digests=DIGESTS)


def ask(parts, tokens, space, count=2):
    salt, adapter = space
    (outputs,) = run(parts, greedy("one", tokens, count, salt, adapter)).values()
    assert tokens_of(outputs) == expected_tokens(tokens, count)
    return outputs[0].cached


def test_every_namespace_starts_empty_and_then_hits_itself_on_the_device():
    with engine() as parts:
        for space in SPACES:
            assert ask(parts, PROMPT, space) == on_device(SPEC, 0), space
        for space in SPACES:
            assert ask(parts, PROMPT, space) == on_device(SPEC, END), space


def test_every_namespace_starts_empty_and_then_hits_itself_on_the_host():
    with engine() as parts:
        for space in SPACES:
            assert ask(parts, PROMPT, space) == on_device(SPEC, 0), space
            evict_device(parts)
        for space in SPACES:
            assert ask(parts, PROMPT, space) == on_host(SPEC, END), space


def test_requests_of_many_namespaces_at_once_compute_each_their_own():
    """None waits for another's computation of the same tokens either."""
    with engine() as parts:
        recorder = RecordingRunner(parts)
        prompts = [greedy(str(i), PROMPT, 2, *space) for i, space in enumerate(SPACES)]
        for outputs in run(parts, *prompts).values():
            assert outputs[0].cached == on_device(SPEC, 0)
            assert tokens_of(outputs) == expected_tokens(PROMPT, 2)
            assert ended(outputs)
        assert recorder.computed_tokens == len(SPACES) * (len(PROMPT) + 1)
        assert max(len(batch.rows) for batch in recorder.batches) > 3


def test_an_adapter_is_its_digest_whatever_its_name():
    with engine() as parts:
        assert ask(parts, PROMPT, ("", "x")) == on_device(SPEC, 0)
        assert ask(parts, PROMPT, ("", "x again")) == on_device(SPEC, END)
        evict_device(parts)
        assert ask(parts, PROMPT, ("", "x again")) == on_host(SPEC, END)
        assert ask(parts, PROMPT, ("a", "x again")) == on_device(SPEC, 0)


def test_an_adapter_that_is_not_loaded_is_refused():
    with engine() as parts:
        with pytest.raises(RequestError, match="the adapter 'z' does not exist"):
            parts.engine.submit(greedy("one", PROMPT, 2, "", "z"))
        assert not parts.engine.has_work()


def test_a_step_says_whose_adapter_each_row_has_or_nothing_at_all():
    with engine() as parts:
        recorder = RecordingRunner(parts)
        run(parts, greedy("plain", PROMPT, 3), greedy("salted", PROMPT, 3, "a"))
        assert all(batch.adapters is None for batch in recorder.batches)
        recorder.batches.clear()
        names = ("", "y", "x again", "x")
        run(parts, *(greedy(name, PROMPT, 3, "b", name) for name in names))
        found = [batch.adapters for batch in recorder.batches if batch.adapters is not None]
        assert {tuple(sorted(adapters.tolist())) for adapters in found} >= {(-1, 0, 1, 2)}
        assert all(adapters.dtype == np.int32 for adapters in found)
        # A row that had an adapter and is taken by a request without one.
        recorder.batches.clear()
        run(parts, *(greedy(str(i), PROMPT, 3, "c") for i in range(4)))
        assert all(batch.adapters is None for batch in recorder.batches)


WALK = st.lists(
    st.tuples(
        st.sampled_from([(salt, adapter) for salt in ("", "a") for adapter in ("", "x", "y")]),
        st.integers(0, 2),  # which text
        st.integers(1, 40),  # how much of it
        st.booleans(),  # the device is emptied before
    ),
    max_size=14,
)


def shared(one, other):
    both = min(len(one), len(other))
    differ = np.flatnonzero(np.array(one[:both]) != np.array(other[:both]))
    return int(differ[0]) if len(differ) else both


@settings(deadline=None, max_examples=60)
@given(WALK)
def test_a_hit_is_what_the_same_namespace_has_seen_and_nothing_else(walk):
    """A perfect model: per namespace, every sequence served. The texts share beginnings."""
    spec = token_spec(PAGE)
    texts = [[7] * 40, [7] * 10 + [8] * 30, [7] * 22 + [9] * 18]
    seen: dict[tuple[str, str], list[list[int]]] = {}
    with token_engine(spec, CONFIG, (400,), (400,), digests=DIGESTS) as parts:
        for space, text, length, emptied in walk:
            if emptied:
                evict_device(parts)
            tokens = texts[text][:length]
            known = seen.setdefault(space, [])
            longest = max((shared(tokens, one) for one in known), default=0)
            cached = ask(parts, tokens, space)
            assert cached.total == min(longest, length - 1) // PAGE * PAGE
            assert not emptied or cached.device == 0
            known.append([*tokens, *expected_tokens(tokens, 1)])


@pytest.mark.parametrize("part", ["salted", "adapted"])
def test_a_namespace_that_loses_a_part_is_seen(part, monkeypatch):
    """The tests above can fail."""
    monkeypatch.setattr(Namespace, part, lambda self, _value: self)
    with pytest.raises(AssertionError):
        test_every_namespace_starts_empty_and_then_hits_itself_on_the_device()
    with pytest.raises(AssertionError):
        test_every_namespace_starts_empty_and_then_hits_itself_on_the_host()


def test_names_and_salts_cannot_be_taken_for_each_other():
    base = Namespace(model=b"m", spec_digest=b"s")
    spaces = Namespaces(base, {"x": b"x"})
    assert spaces.of("", "") == base
    assert spaces.of("x", "") == replace(base, adapter=b"x")
    roots = {spaces.of(adapter, salt).root() for adapter in ("", "x") for salt in ("", "x", "xx")}
    assert len(roots) == 6
    assert (spaces.place(""), spaces.place("x")) == (-1, 0)

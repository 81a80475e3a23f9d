"""Why a prompt was computed: of requests that have run, and of prompts that nobody has sent."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from stratakv.cache import misses
from stratakv.cache.misses import Difference, Evicted, StoppedBy
from stratakv.cache.records import CacheUse
from stratakv.core.config import EngineConfig
from stratakv.engine.why_miss import PromptQuery
from stratakv.spec.retention import KeepBoundary, KeepWindow
from stratakv.tree.nodes import Tier
from tests.engines import evict, evict_device, greedy, run, token_engine, token_spec

WINDOW, STATE = token_spec(4, KeepWindow(10)), token_spec(4, KeepBoundary())
PROMPT = [(7 * n) % 97 for n in range(41)]


def engine(spec=WINDOW, host=100):
    plain = {"page_tokens": 4, "max_running": 3, "max_model_len": 100, "chunk_tokens": 20}
    plain |= {"step_tokens": 60, "reserve_tokens": 1, "load_back_threshold": 1}
    plain |= {} if host else {"cache": "device"}
    groups = len(spec.groups)
    return token_engine(spec, EngineConfig(**plain), [100] * groups, [host] * groups)


def why(parts, name):
    (found,) = parts.engine.misses.of_request(name)
    return found


def asked(tokens, salt=""):
    return PromptQuery(tokens=np.array(tokens, np.int32), adapter="", salt=salt)


def test_a_hit_parts_from_the_prompt_that_it_goes_on_from():
    with engine() as parts:
        run(parts, greedy("first", PROMPT, 1))
        run(parts, greedy("other", [9] * 20, 1))
        run(parts, greedy("branch", [*PROMPT[:30], 1, 2, 3], 1))
        first, branch = why(parts, "first"), why(parts, "branch")
    assert first.parting is None
    assert (first.prompt_tokens, first.cached.total, first.lost) == (41, 0, ())
    assert (branch.parting.other, branch.parting.tokens) == ("first", 30)
    assert branch.parting.difference is Difference.TOKEN


def test_the_nearest_is_of_the_same_tenant_where_there_is_one_that_begins_alike():
    with engine() as parts:
        run(parts, greedy("theirs", PROMPT, 1, salt="x"))
        run(parts, greedy("mine", PROMPT, 1))
        assert why(parts, "mine").parting.difference is Difference.SALT
        run(parts, greedy("again", PROMPT[:24], 1))
        found = why(parts, "again").parting
        assert (found.other, found.difference) == ("mine", Difference.END)


@pytest.mark.parametrize("spec", [WINDOW, STATE])
@pytest.mark.parametrize("host", [0, 100])
def test_a_group_that_stopped_it_is_named_with_where_and_when_its_pages_left(spec, host):
    with engine(spec, host) as parts:
        run(parts, greedy("first", PROMPT, 1))
        if host:
            evict_device(parts)
            evict(parts, Tier.HOST, 1)
        else:
            evict(parts, Tier.DEVICE, 1)
        run(parts, greedy("again", PROMPT, 1))
        found = why(parts, "again")
    (stopped,) = found.stopped
    pages = 3 if spec is WINDOW else 1
    expected = StoppedBy(
        group=spec.groups[1].name, end=40, first=40 - 4 * pages, pages=pages,
        left_device_s=stopped.left_device_s, left_host_s=stopped.left_host_s, wanted=True,
    )  # fmt: skip
    assert stopped == expected
    assert stopped.left_device_s > found.ago_s > 0
    assert (stopped.left_host_s is not None) == bool(host)
    assert (found.usable, found.known) == (0, 40)
    tier = "host" if host else "device"
    reason = "window_incomplete" if spec is WINDOW else "state_missing"
    assert found.lost == ((tier, reason, 40),)


def test_pages_that_were_never_kept_have_not_left():
    with engine(STATE) as parts:
        run(parts, greedy("first", PROMPT, 1))
        run(parts, greedy("branch", [*PROMPT[:22], 1, 2, 3], 1))
        (stopped,) = why(parts, "branch").stopped
    assert (stopped.end, stopped.first, stopped.pages) == (20, 16, 1)
    assert stopped.left_device_s is None
    assert stopped.left_host_s is None
    assert not stopped.wanted


def test_a_row_that_is_used_again_knows_nothing_of_the_page_before():
    with engine(STATE, host=0) as parts:
        run(parts, greedy("older", PROMPT[:21], 1))
        evict_device(parts)
        run(parts, greedy("first", [5] * 41, 1))
        for end in range(5, 40, 4):
            run(parts, greedy(f"branch {end}", [*[5] * end, 1, 2, 3], 1))
            for stopped in why(parts, f"branch {end}").stopped:
                assert stopped.left_device_s is None


@pytest.mark.parametrize("host", [0, 100])
def test_what_has_left_every_tier_and_when(host):
    with engine(host=host) as parts:
        run(parts, greedy("first", PROMPT, 1))
        evict_device(parts)
        for group in (1, 0):
            evict(parts, Tier.HOST, group)
        run(parts, greedy("again", PROMPT, 1))
        found = why(parts, "again")
    assert {(one.tier, one.ago_s > found.ago_s) for one in found.evicted} == {
        ("host" if host else "device", True)
    }
    assert (found.evicted[0].start, found.evicted[-1].end) == (0, 40)
    spans = [(one.start, one.end) for one in found.evicted]
    assert all(one[1] == two[0] for one, two in pairwise(spans))
    assert found.stopped == ()


def test_two_prompts_that_nobody_has_sent():
    with engine(host=0) as parts:
        run(parts, greedy("first", PROMPT, 1))
        ask = parts.engine.misses.of_prompts
        same = ask(asked(PROMPT), asked(PROMPT))
        assert (same.usable, same.cached, same.parting.difference) == (40, None, Difference.END)
        other = ask(asked(PROMPT), asked([*PROMPT[:30], 1, 2]))
        assert (other.parting.tokens, other.parting.difference) == (30, Difference.TOKEN)
        assert ask(asked(PROMPT), asked(PROMPT, "x")).parting.difference is Difference.SALT
        before = parts.engine.stats()
        evict_device(parts)
        gone = ask(asked([1]), asked(PROMPT))
        assert (gone.usable, gone.known, gone.parting.tokens) == (0, 0, 0)
        assert [(e.start, e.end, e.tier) for e in gone.evicted][-1][1:] == (40, "device")
        assert isinstance(gone.evicted[0], Evicted)
        after = parts.engine.stats()
    assert (before.prompt_tokens, before.known_tokens) == (after.prompt_tokens, after.known_tokens)


def test_one_that_was_not_to_read_says_so():
    with engine() as parts:
        run(parts, greedy("first", PROMPT, 1))
        run(parts, replace(greedy("apart", PROMPT, 1), use=CacheUse.STORE))
        found = why(parts, "apart")
    assert (found.use, found.stopped, found.evicted) == (CacheUse.STORE, (), ())


def test_a_request_is_found_by_the_names_that_its_client_knows():
    with engine() as parts:
        for name in ("cmpl-abc-0", "cmpl-abc-1", "mine-def-0", "other-def-0"):
            run(parts, greedy(name, PROMPT[:9], 1))
        found = {
            name: [one.request for one in parts.engine.misses.of_request(name)]
            for name in ("cmpl-abc", "cmpl-abc-1", "cmpl-mine", "chatcmpl-mine", "mine", "cmpl", "")
        }
    assert found == {
        "cmpl-abc": ["cmpl-abc-0", "cmpl-abc-1"], "cmpl-abc-1": ["cmpl-abc-1"],
        "cmpl-mine": ["mine-def-0"], "chatcmpl-mine": ["mine-def-0"], "mine": ["mine-def-0"],
        "cmpl": [], "": [],
    }  # fmt: skip


@pytest.mark.parametrize(("name", "most"), [("MOST_PROMPTS", 3), ("MOST_TOKENS", 3 * 41)])
def test_the_oldest_are_forgotten(monkeypatch, name, most):
    monkeypatch.setattr(misses, name, most)
    with engine() as parts:
        for at in range(5):
            run(parts, greedy(f"r{at}", PROMPT, 1))
        left = [f"r{at}" for at in range(5) if parts.engine.misses.of_request(f"r{at}")]
    assert left == ["r2", "r3", "r4"]

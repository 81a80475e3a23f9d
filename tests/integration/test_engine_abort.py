"""An abort at any phase leaves nothing behind: every page is accounted for at once, and free after
a flush; whoever shares the prefix goes on undisturbed.
"""

import numpy as np
import pytest

from stratakv.core.config import EngineConfig
from stratakv.core.ids import RequestId
from stratakv.engine.request import FinishReason, Phase
from stratakv.spec.retention import KeepWindow
from stratakv.testing.transfer_ends import CopyHold, HookedCopier
from stratakv.transfer.copy_plan import Direction
from stratakv.transfer.cpu import DEFAULT_COPIER
from tests.engines import (
    VOCABULARY,
    assert_nothing_left,
    drain,
    ended,
    evict_device,
    expected_tokens,
    greedy,
    run,
    token_engine,
    token_spec,
    tokens_of,
)

SPEC = token_spec(4, KeepWindow(10))
CONFIG = EngineConfig(
    page_tokens=4,
    max_running=4,
    max_model_len=200,
    chunk_tokens=9,
    step_tokens=20,
    load_back_threshold=5,
)
PROMPT = [n * 7 % VOCABULARY for n in range(60)]


class HoldLoads:
    """Backups pass; loads wait until they are allowed."""

    def __init__(self) -> None:
        self._hold = CopyHold()
        self.release = lambda: self._hold.allow(1_000)

    def __call__(self, direction, group, layers):
        if direction is Direction.LOAD:
            self._hold(direction, group, layers)


def engine(copier=DEFAULT_COPIER):
    return token_engine(SPEC, CONFIG, (60, 30), (100, 100), copier)


def phase_of(parts, name):
    return parts.engine.status(RequestId(name)).phase


def abort(parts, name):
    parts.engine.abort(RequestId(name))
    parts.engine.check()
    assert parts.engine.status(RequestId(name)) is None
    outputs = [output for output in parts.engine.step() if output.request == name]
    assert ended(outputs) is FinishReason.ABORT
    assert outputs[-1].token is None


@pytest.mark.parametrize("steps", range(12))
def test_abort_after_so_many_steps(steps):
    """0: waiting; up to 6: in the middle of its chunks; then decoding."""
    with engine() as parts:
        parts.engine.submit(greedy("r", PROMPT, 8))
        for _ in range(steps):
            parts.engine.step()
        expected = Phase.WAITING if not steps else Phase.PREFILLING
        assert phase_of(parts, "r") is (Phase.DECODING if steps > 6 else expected)
        abort(parts, "r")
        drain(parts)
        # What was computed is of use to whoever comes next, and is right.
        out = run(parts, greedy("next", PROMPT, 8))["next"]
        assert tokens_of(out) == expected_tokens(PROMPT, 8)
        # One page more where the answer is cached as well; never more than the prompt can use.
        assert out[0].cached.total == min(56, 9 * steps // 4 * 4)
        assert_nothing_left(parts)


def test_abort_while_waiting_behind_others():
    with engine() as parts:
        for n in range(6):
            parts.engine.submit(greedy(str(n), [n, *PROMPT], 4))
        parts.engine.step()
        assert phase_of(parts, "5") is Phase.WAITING
        abort(parts, "5")
        got = drain(parts)
        assert {output.request for output in got} == set("01234")
        assert_nothing_left(parts)


@pytest.mark.parametrize("submitted", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_abort_while_its_load_is_begun_or_in_flight(joined, submitted):
    """Another request may already stand on the landing pages: it gets them."""
    hold = HoldLoads()
    with engine(HookedCopier(DEFAULT_COPIER, hold)) as parts:
        run(parts, greedy("first", PROMPT, 2))
        evict_device(parts)
        parts.engine.submit(greedy("r", PROMPT, 4))
        if joined:
            parts.engine.submit(greedy("joined", PROMPT, 4))
        parts.engine.admit()  # a whole step would wait for the load
        assert phase_of(parts, "r") is Phase.PREFILLING
        assert parts.cache.progress.busy
        if submitted:
            parts.cache.tiers.copies.flights.submit_loads()
        else:
            hold.release()  # nobody has begun to copy
        parts.engine.abort(RequestId("r"))
        parts.engine.check()
        assert not parts.engine.flush() if joined else parts.cache.progress.busy
        hold.release()
        out = [output for output in drain(parts) if output.request == "joined"]
        assert tokens_of(out) == (expected_tokens(PROMPT, 4) if joined else [])
        if joined:
            assert out[0].cached.total == 56
        assert run(parts, greedy("again", PROMPT, 4))["again"][0].cached.device == 56
        assert_nothing_left(parts)


def test_abort_of_the_unknown_and_the_finished_is_no_error():
    with engine() as parts:
        parts.engine.abort(RequestId("nobody"))
        assert not parts.engine.has_work()
        run(parts, greedy("r", PROMPT, 2))
        parts.engine.abort(RequestId("r"))
        assert not parts.engine.has_work()
        assert_nothing_left(parts)


def test_abort_of_the_one_that_another_request_waits_for():
    """The second waits for the first one's pages; when the first goes, it computes the rest."""
    with engine() as parts:
        parts.engine.submit(greedy("first", PROMPT, 4))
        parts.engine.submit(greedy("second", PROMPT, 4))
        parts.engine.step()
        parts.engine.step()
        assert phase_of(parts, "second") is Phase.WAITING
        abort(parts, "first")
        assert phase_of(parts, "second") is Phase.PREFILLING
        out = [output for output in drain(parts) if output.request == "second"]
        assert tokens_of(out) == expected_tokens(PROMPT, 4)
        assert out[0].cached.device == 16
        assert_nothing_left(parts)


def test_closing_aborts_what_is_left():
    with engine() as parts:
        for n in range(6):
            parts.engine.submit(greedy(str(n), [n, *PROMPT], 4))
        parts.engine.step()
        parts.engine.close()
        parts.engine.check()
        assert parts.engine.stats().running == 0
        assert_nothing_left(parts)


def test_three_hundred_random_aborts():
    rng = np.random.default_rng(3)
    prompts: dict[str, list[int]] = {}
    got: dict[str, list[int | None]] = {}
    aborted = 0
    with token_engine(SPEC, CONFIG, (40, 24), (50, 30)) as parts:
        while aborted < 300:
            action = rng.random()
            live = [one.id for one in parts.engine.statuses()]
            if action < 0.4 and len(live) < 8:
                name = f"r{len(prompts)}"
                tail = rng.integers(0, VOCABULARY, int(rng.integers(1, 30))).tolist()
                prompts[name] = PROMPT[: int(rng.integers(0, 60))] + tail
                got[name] = []
                parts.engine.submit(greedy(name, prompts[name], 8))
            elif action < 0.6 and live:
                parts.engine.abort(rng.choice(live))
                aborted += 1
                if not aborted % 10:
                    parts.engine.check()
            else:
                for output in parts.engine.step():
                    got[output.request].append(output.token)
        for output in drain(parts):
            got[output.request].append(output.token)
        finished = 0
        for name, tokens in got.items():
            whole = expected_tokens(prompts[name], 8)
            generated = [token for token in tokens if token is not None]
            assert generated == whole[: len(generated)]
            assert tokens[-1] is None or len(generated) == 8
            finished += len(generated) == 8
        assert finished > 20
        assert parts.cache.tiers.pools.counters.load_pages > 0
        assert_nothing_left(parts)

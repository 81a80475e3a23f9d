"""A session's own promises: an engine that hangs is not waited for, one that is slow is."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from stratakv.assembly.build import Sockets
from stratakv.assembly.verify_engine import Tried
from stratakv.core.config import EngineConfig
from stratakv.core.ids import RequestId
from stratakv.engine.forward import Forward
from stratakv.engine.request import Failure
from stratakv.engine.sampling import Sampled
from stratakv.engine.verify.claims import compare
from stratakv.engine.verify.session import HANG_S, Scribe, VerifyOutput, VerifySession
from stratakv.spec.retention import KeepWindow
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.transfer_ends import HookedCopier
from stratakv.transfer.cpu import DEFAULT_COPIER
from tests.engines import drain, expected_tokens, token_engine, token_spec

SPEC = token_spec(4, KeepWindow(10))
CONFIG = EngineConfig(
    page_tokens=4, max_running=3, max_model_len=200, chunk_tokens=20, step_tokens=80
)
PROMPT = np.arange(81, dtype=np.int32) % 97


class Ticking:
    """A clock that says ``by_s`` more whenever it is asked."""

    def __init__(self, by_s):
        self.by_s, self.at_s = by_s, 0.0

    def now_s(self):
        self.at_s += self.by_s
        return self.at_s


@contextmanager
def session(by_s, copier=DEFAULT_COPIER):
    scribe = Scribe()
    sockets = Sockets(token_source=scribe)
    with token_engine(SPEC, CONFIG, (60, 60), (60, 60), copier, sockets=sockets) as parts:
        yield VerifySession(Tried(parts), scribe, Ticking(by_s))


def test_an_engine_that_is_slow_is_waited_for():
    with session(by_s=0.9 * HANG_S) as this:
        reply = this.ask(PROMPT, 9, "")
        assert list(reply.tokens) == expected_tokens(PROMPT.tolist(), 9)
        assert reply.first_s > 3 * HANG_S  # a prompt in several chunks says nothing for long


def test_one_that_does_not_move_is_given_up():
    copies = threading.Event()

    def held(*_):
        assert copies.wait(PATIENCE_S), "it was never let go"

    with session(by_s=0.1 * HANG_S, copier=HookedCopier(DEFAULT_COPIER, held)) as this:
        name = this.submit(PROMPT, 2, "")
        try:
            with pytest.raises(TimeoutError, match=f"not moved for {HANG_S:g} s"):
                this.drain()
        finally:
            copies.set()
        this.drain()
        assert list(this.reply(name).tokens) == expected_tokens(PROMPT.tolist(), 2)


def test_what_does_not_come_is_not_waited_for_when_nothing_is_left_to_do():
    with session(by_s=1.0) as this:
        name = this.submit(PROMPT, 2, "")
        this.subject.engine.abort(name)
        with pytest.raises(TimeoutError, match="nothing left to do"):
            this.step_until(lambda outputs: any(output.token is not None for output in outputs))


def test_replies_are_those_that_ended_under_the_names_they_were_given():
    with session(by_s=1.0) as this:
        for name in ("a", "gone", "b"):
            this.submit(PROMPT, 2, name, name=RequestId(name))
        this.subject.engine.abort(RequestId("gone"))
        this.drain()
        replies = this.replies()
        assert list(replies) == ["a", "b"]
        assert {reply.tokens for reply in replies.values()} == {
            tuple(expected_tokens(PROMPT.tolist(), 2))
        }
        assert not this.replies()


def test_whoever_never_ends_is_missed():
    with session(by_s=1.0) as this:
        this.submit(PROMPT, 1, "", name=RequestId("lost"))
        drain(this.subject.parts)  # somebody else takes the news
        with pytest.raises(AssertionError, match="lost: no end was given"):
            this.drain()


# -- requests that fail ------------------------------------------------------------------------


class TwoFail:
    """Of four sampled rows the second cannot be sampled, and what the third computed is broken."""

    def choose(self, forward, params):
        return Sampled(np.array([3, -1, 5, 7], np.int32), [None] * 4, np.array([3]))

    def idle(self):
        raise AssertionError("it was not idle")


def test_logits_of_rows_that_fail_are_left_out():
    scribe = Scribe(TwoFail())
    sampled = np.array([True, False, True, True, True])
    logits = torch.arange(4.0)[:, None].expand(4, 2)
    scribe.choose(Forward(logits, torch.ones(5, dtype=torch.bool), sampled), None)
    assert scribe.logits[:, 0].tolist() == [0.0, 3.0]


class Elsewhere(torch.Tensor):
    """In a device's memory, where no tensor of the CPU can be compared with it."""

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_logits_are_kept_on_the_cpu():
    scribe = Scribe(TwoFail())
    logits = torch.arange(4.0)[:, None].expand(4, 2).as_subclass(Elsewhere)
    scribe.choose(Forward(logits, torch.ones(4, dtype=torch.bool), np.ones(4, np.bool_)), None)
    assert type(scribe.logits) is torch.Tensor


def reply(*tokens, failure=None):
    logits = torch.nn.functional.one_hot(torch.tensor(tokens, dtype=torch.int64), 8).float()
    return VerifyOutput(tokens, logits, 0.0, None, failure)


def test_what_failed_differs_where_it_ended_if_not_before():
    failed = Failure.NOT_FINITE
    assert compare(reply(1, 2, 3), reply(1, 2, failure=failed), 1e-5) == (2, float("inf"))
    assert compare(reply(1, 2, 3), reply(4, 2, failure=failed), 1e-5) == (0, float("inf"))
    assert compare(reply(1, 2, 3), reply(failure=failed), 1e-5) == (0, float("inf"))
    assert compare(reply(1, 2, 3), reply(1, 2, 3), 1e-5) == (None, 0.0)

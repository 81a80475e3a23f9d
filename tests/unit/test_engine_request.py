"""The phase table: every legal step, and no other."""

import itertools
import pickle

import numpy as np
import pytest

from stratakv.cache.records import CacheUse
from stratakv.core.ids import RequestId
from stratakv.core.page_keys import Namespace, PageHasher
from stratakv.engine.request import PHASES, Phase, Prompt, Request, SamplingParams, Signal

P, S = Phase, Signal
LEGAL = {
    (P.WAITING, S.ADMITTED): P.PREFILLING,
    (P.WAITING, S.RESERVED): P.TRANSFERRING,
    (P.PREFILLING, S.PREFILL_DONE): P.DECODING,
    (P.PREFILLING, S.SENDING): P.TRANSFERRING,
    (P.TRANSFERRING, S.RECEIVED): P.DECODING,
    (P.TRANSFERRING, S.SENT): P.FINISHED,
    (P.TRANSFERRING, S.ABORT): P.ABORTED,
    (P.TRANSFERRING, S.RETRACT): P.RETRACTED,
    (P.PREFILLING, S.STOPPED): P.FINISHED,
    (P.DECODING, S.STOPPED): P.FINISHED,
    (P.PREFILLING, S.RETRACT): P.RETRACTED,
    (P.DECODING, S.RETRACT): P.RETRACTED,
    (P.RETRACTED, S.ADMITTED): P.PREFILLING,
    (P.RETRACTED, S.RESERVED): P.TRANSFERRING,
    (P.RETRACTED, S.ABORT): P.ABORTED,
    (P.WAITING, S.ABORT): P.ABORTED,
    (P.PREFILLING, S.ABORT): P.ABORTED,
    (P.DECODING, S.ABORT): P.ABORTED,
}
WAY = {
    P.WAITING: (),
    P.PREFILLING: (S.ADMITTED,),
    P.TRANSFERRING: (S.RESERVED,),
    P.DECODING: (S.ADMITTED, S.PREFILL_DONE),
    P.RETRACTED: (S.ADMITTED, S.PREFILL_DONE, S.RETRACT),
    P.FINISHED: (S.ADMITTED, S.PREFILL_DONE, S.STOPPED),
    P.ABORTED: (S.ABORT,),
}


def request_in(phase):
    prompt = Prompt(
        id=RequestId("r"), tokens=np.array([1, 2, 3], np.int32), sampling=SamplingParams()
    )
    prefix = PageHasher(Namespace(model=b"m", spec_digest=b"s"), 4)
    made = Request(prompt=prompt, prefix=prefix, total_tokens=10, serial=1)
    for signal in WAY[phase]:
        made.signal(signal)
    assert made.phase is phase
    return made


@pytest.mark.parametrize(("phase", "signal"), list(itertools.product(Phase, Signal)))
def test_every_pair_of_phase_and_signal(phase, signal):
    made = request_in(phase)
    if (phase, signal) in LEGAL:
        made.signal(signal)
        assert made.phase is LEGAL[phase, signal]
    else:
        with pytest.raises(AssertionError, match=f"{signal.name} is illegal in {phase.name}"):
            made.signal(signal)
        assert made.phase is phase


def test_the_table_has_no_other_row():
    assert PHASES == LEGAL


def test_a_new_request_waits_and_holds_nothing():
    made = request_in(P.WAITING)
    assert (made.row, made.cached, made.tickets, made.prompt_tokens) == (-1, None, (), 3)


@pytest.mark.parametrize("use", [CacheUse.ALL, CacheUse.READ, CacheUse.STORE, CacheUse.NOTHING])
def test_a_prompt_in_a_step_message_keeps_its_use_of_the_cache(use):
    """Ranks pickle it, and ask by identity whether that is all."""
    prompt = Prompt(
        id=RequestId("r"), tokens=np.ones(3, np.int32), sampling=SamplingParams(), use=use
    )
    assert pickle.loads(pickle.dumps(prompt)).use is use

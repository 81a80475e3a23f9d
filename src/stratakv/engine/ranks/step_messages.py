"""What rank 0 sends the others: one message in each step.

Owns the message (the tokens of a step, the time, and what clients and operators want) and a rank's
end of its broadcast. What it asks for ``ranked`` does when the step is over. Must not decide
anything.

Messages are pickled: ranks are processes of one deployment and trust each other, as
``torch.distributed`` itself does.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from stratakv.agreement.agreement import Agreement
from stratakv.core.clock import BroadcastClock, Clock
from stratakv.core.ids import RequestId, TokenIds
from stratakv.engine.attachment import StorageCall
from stratakv.engine.batch import SamplingBatch
from stratakv.engine.forward import Forward
from stratakv.engine.ranks.peer_calls import NoPeers, PeerCall, PeerCalls
from stratakv.engine.request import Prompt
from stratakv.engine.sampling import Places, Sampled, choose

_NOTHING: Final = Sampled(np.empty(0, np.int32), [])


@dataclass(frozen=True, slots=True)
class Submit:
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class AbortRequest:
    request: RequestId


@dataclass(frozen=True, slots=True)
class Flush:
    pass


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command: TypeAlias = Submit | AbortRequest | Flush | StorageCall | PeerCall | Stop


@dataclass(frozen=True, slots=True, eq=False)
class StepMessage:
    """``tokens``, ``broken``: as in ``Sampled``."""

    now_s: float
    tokens: TokenIds
    broken: Places
    commands: tuple[Command, ...]


class StepSync:
    """A rank's end of the broadcast: a ``TokenSource`` for the engine's step. ``clock``: rank 0's
    own time; ``shared``: what all ranks take for the time."""

    def __init__(self, agreement: Agreement, clock: Clock, shared: BroadcastClock) -> None:
        self._agreement = agreement
        self._clock = clock
        self._shared = shared
        self.outbox: list[Command] = []
        self._came: tuple[Command, ...] = ()
        self._peers: PeerCalls = NoPeers()

    def choose(self, forward: Forward, params: SamplingBatch) -> Sampled:
        """Rank 0 chooses for all, so that rounding on another rank decides nothing; it also names
        who cannot go on."""
        if self._agreement.leads:
            sampled = choose(forward, params)
            self._meet(sampled)
            return sampled
        message = self._meet(_NOTHING)
        assert len(message.tokens) == len(params.seeds), "rank 0 has another batch"
        scores = [] if params.targets is None else [None] * len(params.targets.tokens)
        return Sampled(message.tokens, [None] * len(message.tokens), message.broken, scores)

    def idle(self) -> None:
        self._meet(_NOTHING)

    def _meet(self, sampled: Sampled) -> StepMessage:
        mine = b""
        if self._agreement.leads:
            message = StepMessage(
                self._clock.now_s(), sampled.tokens, sampled.broken, tuple(self.outbox)
            )
            mine = pickle.dumps(message)
            self.outbox.clear()
        message: StepMessage = pickle.loads(self._agreement.broadcast(mine))
        self._shared.set(message.now_s)
        self._came = message.commands
        return message

    def gather(self, text: str) -> Sequence[str]:
        """What every rank reports; between two steps, where a message has asked all of them."""
        return self._agreement.gather(text)

    def work_with(self, peers: PeerCalls) -> None:
        """Have ``peers`` do what a ``PeerCall`` asks for."""
        self._peers = peers

    def call_peers(self, asked: PeerCall) -> None:
        """On every rank, between two steps."""
        reports = self._agreement.gather(self._peers.call(asked))
        self._peers.answered(asked, reports)

    def part(self) -> None:
        """Meet nobody any more."""
        self._agreement.part()

    def take(self) -> tuple[Command, ...]:
        """What the last message asks for; given once."""
        came, self._came = self._came, ()
        return came

"""What clients and operators do to both sides of a pair, and whether they get what is promised.

Owns the sessions: who may fail, because somebody has given it up or a link has broken, and who may
not. Must not look inside an engine.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import assert_never

from stratakv.core.ids import RequestId
from stratakv.engine.attachment import StorageCall
from stratakv.engine.ranks.peer_calls import PeerCall
from stratakv.engine.ranks.step_messages import AbortRequest, Flush, Stop, Submit
from stratakv.engine.request import Failure, FinishReason, Output, Prompt
from stratakv.testing.fleet.client import EngineClient
from stratakv.testing.fleet.member import Member
from stratakv.testing.fleet.pair_plan import DECODE, PREFILL, BreakLink, PairEvent
from stratakv.testing.hand_off import HandOffSide


@dataclass(slots=True, eq=False)
class PairSession:
    """``asked``: of which sides, by which requests. ``excused``: it may fail."""

    asked: dict[HandOffSide, list[RequestId]] = field(
        default_factory=lambda: {side: [] for side in HandOffSide}
    )
    excused: bool = False


class SideClient(EngineClient):
    """``excused``: names of sessions that may fail, of both sides."""

    def __init__(self, member: Member, *, reuse: bool) -> None:
        super().__init__(member.plan, member.engine, reuse=reuse)
        self.side = member.side
        self.sessions: dict[RequestId, PairSession] = {}
        self.outcomes: Counter[FinishReason] = Counter()

    def verify_end(self, output: Output, *, whole: bool) -> None:
        request, finish = output.request, output.finish
        assert finish is not None, "no end"
        self.outcomes[finish] += 1
        session = self.sessions.get(request)
        match finish:
            case FinishReason.HANDED_OFF:
                right = self.side is PREFILL and len(self.outputs[request]) == 1
            case FinishReason.ABORT:
                right = request in self.aborted
            case FinishReason.ERROR:
                failed = output.failure is Failure.TRANSFER and session is not None
                right = failed and session is not None and session.excused
            case _:
                right = self.side is DECODE and whole
        assert right, (
            f"{request} of {self.side.name} ended as {finish} ({output.failure}: {output.reason}) "
            f"after {len(self.outputs[request])} tokens"
        )


class PairClient:
    """``patient``: whether deadlines fail nobody."""

    def __init__(self, members: dict[HandOffSide, Member], *, patient: bool) -> None:
        reuse = any(member.plan.reuse for member in members.values())
        self.sides = {side: SideClient(each, reuse=reuse) for side, each in members.items()}
        self._down = False
        self._patient = patient
        self._sessions: dict[str, PairSession] = {}

    def do(self, event: PairEvent) -> None:
        client = self.sides[event.side]
        match event.command:
            case Submit(prompt):
                self._submit(client, prompt)
            case AbortRequest(request):
                session = client.sessions.get(request)
                if session is not None:
                    session.excused = True
                client.do(event.command)
            case Flush() | StorageCall():
                client.do(event.command)
            case BreakLink() | PeerCall() | Stop():
                raise AssertionError(f"{event.command} is no client's")
            case _:
                assert_never(event.command)

    def _submit(self, client: SideClient, prompt: Prompt) -> None:
        if prompt.session is not None:
            session = self._sessions.setdefault(prompt.session.name, PairSession())
            client.sessions[prompt.id] = session
            session.asked[client.side].append(prompt.id)
            again = len(session.asked[client.side]) > 1
            session.excused |= again or self._down or not self._patient
        client.do(Submit(prompt))
        if prompt.session is not None and prompt.id not in client.prompts:
            # One side would never have room for it, as for one that is kept out of the cache and
            # may not be spilled: the other side waits until somebody gives it up.
            self._sessions[prompt.session.name].excused = True

    def see_links(self, *, down: bool) -> None:
        """Whether one is down from now on: whoever is submitted then may fail."""
        self._down = down

    def excuse_open(self) -> None:
        """Whoever has not ended on both sides may fail: their link is about to break."""
        for session in self._sessions.values():
            session.excused |= self._is_open(session)

    @property
    def waits(self) -> bool:
        """Whether somebody has not ended who may not fail."""
        waiting = [each for each in self._sessions.values() if not each.excused]
        return any(map(self._is_open, waiting))

    @property
    def open(self) -> bool:
        """Whether a request has not ended."""
        return any(len(each.ended) < len(each.prompts) for each in self.sides.values())

    def give_up(self) -> None:
        """Whoever may fail has waited long enough: somebody may wait for their pages."""
        for client in self.sides.values():
            for request, session in client.sessions.items():
                left = request in client.prompts and request not in client.ended
                if left and session.excused and request not in client.aborted:
                    client.do(AbortRequest(request))

    def _is_open(self, session: PairSession) -> bool:
        return not all(
            session.asked[side] and all(name in client.ended for name in session.asked[side])
            for side, client in self.sides.items()
        )

    def lonely(self) -> None:
        """Whoever only one side knows, after all were submitted, may fail."""
        for session in self._sessions.values():
            session.excused |= not all(session.asked.values())

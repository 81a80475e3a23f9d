"""Sessions of a side that computes prompts, by name, and how much of them each peer has asked for.

Owns which of them count against a peer's limits, and that its link is in use. Must not know who is
notified of their ends (``prefill_role``).
"""

from collections.abc import Collection
from dataclasses import dataclass

from stratakv.disagg.link_uses import LinkUses
from stratakv.disagg.messages import Reserve
from stratakv.disagg.peer_limits import PeerLimits
from stratakv.disagg.sending import PagesWanted, Sending
from stratakv.disagg.transport import PeerId


@dataclass(slots=True)
class _Use:
    sessions: int = 0
    numbers: int = 0


class OpenSessions:
    def __init__(self, limits: PeerLimits, links: LinkUses) -> None:
        self._limits, self._links = limits, links
        self._sessions: dict[str, Sending] = {}
        self._uses: dict[PeerId, _Use] = {}

    def get(self, name: str) -> Sending | None:
        return self._sessions.get(name)

    def entries(self) -> Collection[Sending]:
        return self._sessions.values()

    def add(self, entry: Sending) -> Sending:
        self._sessions[entry.session.name] = entry
        return entry

    def refusal(self, peer: PeerId, asked: Reserve) -> str:
        """Why ``peer`` may not ask for that too; "": it may."""
        entry = self._sessions.get(asked.attempt.session)
        if entry is not None and entry.wanted is not None:
            return f"{entry.session.name} is computed for {entry.wanted.peer}"
        use, most = self._uses.get(peer, _Use()), self._limits
        if use.sessions >= most.sessions:
            return f"{peer} has asked for {use.sessions} requests; {most.sessions} are allowed"
        numbers = use.numbers + _numbers(asked)
        if numbers > most.numbers:
            return f"{peer} has named {numbers} pages and tokens; {most.numbers} are allowed"
        return ""

    def want(self, entry: Sending, wanted: PagesWanted) -> None:
        """``entry``, which is here, is ``wanted``."""
        entry.want(wanted)
        self._links.use(wanted.peer)
        use = self._uses.setdefault(wanted.peer, _Use())
        use.sessions += 1
        use.numbers += _numbers(wanted.reserve)

    def remove(self, entry: Sending) -> None:
        del self._sessions[entry.session.name]
        if entry.wanted is None:
            return
        self._links.leave(entry.wanted.peer)
        use = self._uses[entry.wanted.peer]
        use.sessions -= 1
        use.numbers -= _numbers(entry.wanted.reserve)
        if not use.sessions:
            del self._uses[entry.wanted.peer]


def _numbers(asked: Reserve) -> int:
    again = 0 if asked.again is None else len(asked.again.tokens)
    return asked.pages.count + again

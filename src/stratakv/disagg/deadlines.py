"""What the sessions of both roles have in common: their limits, and when one is next to be looked
at. Owns no session.
"""

import hashlib
from dataclasses import dataclass, field
from math import inf

from stratakv.disagg.peer_limits import NAME_CHARS, PeerLimits
from stratakv.disagg.session import SessionLimits
from stratakv.engine.request import Prompt, Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffLimits:
    """``sessions``: how long each state may take. ``answer_s``: how much later the pages of a
    transfer that has taken too long are in quarantine and its peer's link is torn down.
    ``claim_s``: how long decode's pages wait for a request that has not come to prefill at all, if
    that is less, and for a few of its steps. ``peer``: how much one may ask for."""

    sessions: SessionLimits = field(default_factory=SessionLimits)
    answer_s: float = 30.0
    claim_s: float = 30.0
    peer: PeerLimits = field(default_factory=PeerLimits)


class Due:
    """The earliest of many deadlines, so that a step without any looks at none."""

    def __init__(self) -> None:
        self._at_s = inf

    def add(self, deadline_s: float) -> None:
        self._at_s = min(self._at_s, deadline_s)

    def passed(self, now_s: float) -> bool:
        """Whether one may have; if so all that are left are to be added again."""
        if now_s < self._at_s:
            return False
        self._at_s = inf
        return True


def session_name(prompt: Prompt) -> str:
    """What both sides call its hand-off."""
    return bounded(prompt.id if prompt.session is None else prompt.session.name)


def bounded(name: str) -> str:
    """A name as it is, of a long one its hash, which is the same when it is bounded again."""
    if len(name) <= NAME_CHARS // 2:
        return name
    return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()


def prompt_identity(request: Request, sampling: SamplingParams) -> str:
    """Of all that decides a prompt's pages, its first token and what is reported with that: tokens,
    model, adapter, tenant and how the token is chosen, ``sampling``; hexadecimal. What is computed
    for one is right for no other. How many tokens follow is not in it: some routers ask prefill
    for one."""
    chosen: tuple[float, ...] = ()  # greedy: nothing else counts
    if sampling.temperature:
        shares = float(sampling.temperature), float(sampling.top_p), float(sampling.min_p)
        chosen = *shares, sampling.top_k, sampling.seed
    barred = sampling.stop_tokens if sampling.min_tokens else ()
    changed = float(sampling.repetition_penalty), sampling.logit_bias, barred, sampling.grammar
    found = hashlib.sha256(request.prefix.namespace.root())
    found.update(repr((chosen, changed, sampling.logprobs)).encode())
    found.update(request.known.tobytes())
    return found.hexdigest()

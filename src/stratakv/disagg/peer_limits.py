"""How much of this side one peer may take up: it is another machine, and may be broken, or lie.

Owns the numbers. Each is far beyond what an honest peer comes to, and what is beyond it is refused
or ends that peer's link; nothing waits for it. Must not count.
"""

from dataclasses import dataclass
from typing import Final

from stratakv.agreement.ballot import SLOTS, SlotKind

MOST_PEERS: Final = SLOTS[SlotKind.LINK]
"""At a time, those that are being joined among them: so many have a slot in the ballot."""
NAME_CHARS: Final = 1024
"""Of a session's or a peer's name, a salt and an adapter. Those of clients have half as many; what
is sent back has its session's and a number behind it."""
REASON_CHARS: Final = 1000
"""Of a peer's words for people; the rest is cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLimits:
    """What one peer may have at a time. ``sessions`` that it has asked for and that have not ended:
    it holds pages for each, so it has no more than it runs requests (``--max-running``, 32 where
    nobody says otherwise). ``numbers`` in them, which are pages by name and tokens to be computed
    again: no page is in two of them, and 4 million of one token each are more than a device holds.
    ``ended``: names that it has given up before this side knew them, or this side before it did;
    beyond that the oldest is forgotten, and its request waits until it has taken too long."""

    sessions: int = 4096
    numbers: int = 1 << 22
    ended: int = 4096


def short(found: object) -> str:
    """A name of a peer. ValueError where it is longer than any, or no text: JSON can spell lone
    surrogates."""
    name = str(found)
    if len(name) > NAME_CHARS:
        raise ValueError(f"a name of {len(name)} characters; {NAME_CHARS} are allowed")
    name.encode()
    return name

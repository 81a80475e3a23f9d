"""What two engines must have in common to hand a request over, and the refusal where they have not.

Owns the record and its comparison. Comes from another machine: read with care. Pure.
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from stratakv.core.errors import TransportError
from stratakv.core.ids import GroupId

HANDSHAKE_BYTES: Final = 64 << 10
"""The longest one that is read."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Slice ``index`` of ``count`` equal ones, between key heads, of each row of a page."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class SideRank:
    """Rank ``rank`` of ``ranks``, as the other side sees it (``lanes``). ``whole``: digest of the
    cache spec of all of them together; None: this one has all of it. Of this process's pages, by
    group: ``cuts``, what is this rank's (): everything; ``alike``, of which all ranks have the
    same; and ``left_out``, of those, what another rank of this process receives."""

    rank: int = 0
    ranks: int = 1
    whole: bytes | None = None
    cuts: tuple[Cut, ...] = ()
    alike: frozenset[GroupId] = frozenset()
    left_out: frozenset[GroupId] = frozenset()

    def cut(self, group: GroupId) -> Cut:
        return self.cuts[group] if self.cuts else Cut()


ALL: Final = SideRank()

_MENDS: Final = {"ranks": " (allowed on the side with fewer: --peer-tp with the other's number)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """One side. ``model``: identity of the weights, hexadecimal; ``spec``: digest of the cache spec
    of all ranks together; ``layout``: bytes of a page of this rank, by group; ``ranks``: how many
    share each page as it is handed over; ``rank``: which of them this is; ``protocol``: of what the
    two send each other."""

    protocol: int
    model: str
    spec: str
    page_tokens: int
    dtypes: tuple[str, ...]
    layout: tuple[int, ...]
    ranks: int
    rank: int

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> "Handshake":
        """TransportError where it is none."""
        if len(data) > HANDSHAKE_BYTES:
            raise TransportError(f"the peer's handshake has {len(data)} bytes")
        try:
            found: Any = json.loads(data)
            return Handshake(
                protocol=int(found["protocol"]),
                model=str(found["model"]),
                spec=str(found["spec"]),
                page_tokens=int(found["page_tokens"]),
                dtypes=tuple(map(str, found["dtypes"])),
                layout=tuple(map(int, found["layout"])),
                ranks=int(found["ranks"]),
                rank=int(found["rank"]),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise TransportError(f"the peer's handshake cannot be read: {error!r}") from error

    def refusal(self, peer: "Handshake") -> str:
        """Why the two cannot work together, each difference with both values; "": they can."""
        differences = [
            f"{each.name} is {ours!r} here and {theirs!r} there{_MENDS.get(each.name, '')}"
            for each in fields(self)
            if (ours := getattr(self, each.name)) != (theirs := getattr(peer, each.name))
        ]
        return "; ".join(differences)

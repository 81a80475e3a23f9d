"""What two engines must have in common to hand a request over, and the refusal where they have not.

Owns the record and its comparison. Comes from another machine: read with care. Pure.
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from stratakv.core.errors import TransportError

HANDSHAKE_BYTES: Final = 64 << 10
"""The longest one that is read."""


@dataclass(frozen=True, slots=True)
class SideRank:
    """Rank ``rank`` of ``ranks``. ``whole``: digest of the cache spec of all of them together;
    None: this one has all of it."""

    rank: int = 0
    ranks: int = 1
    whole: bytes | None = None


ALL: Final = SideRank()


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """One side. ``model``: identity of the weights, hexadecimal; ``spec``: digest of the cache spec
    of all ranks together; ``layout``: bytes of a page of this rank, by group; ``ranks``: how many
    share each page; ``rank``: which of them this is; ``protocol``: of what the two send each
    other."""

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
            f"{each.name} is {ours!r} here and {theirs!r} there"
            for each in fields(self)
            if (ours := getattr(self, each.name)) != (theirs := getattr(peer, each.name))
        ]
        return "; ".join(differences)

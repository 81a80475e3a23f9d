"""Who of several ranks hashes which piece of the weights, and whose digests a rank may take.

Owns the rule, and what ranks exchange for it. Must not read files.

A rank may take another's digest of a file only if that is its own file: both run on one kernel,
have seen the same device, inode, size, mtime and ctime, any write would have shown there, and both
look again when all is done. So those who report the same of every file are a team; files whose
inodes are not trusted are hashed by each of them. A rank that sees anything else, or runs
elsewhere, is a team of its own, has the whole work to do, and is found when identities are
compared.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stratakv.core.identity.digests import framed
from stratakv.core.identity.model_files import Checkpoint
from stratakv.core.identity.tensor_reader import Piece

Digests: TypeAlias = Mapping[int, Sequence[bytes]]
"""Of the tensors of pieces, by the piece's number."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """What a rank reports before it hashes. ``team``: the same for all who have the same files,
    empty for who has nothing in common with anybody; ``cached``: numbers of files whose digests it
    has. ``refusal``: why it cannot load the model."""

    refusal: str = ""
    team: str = ""
    cached: tuple[int, ...] = ()

    def text(self) -> str:
        return json.dumps([self.refusal, self.team, self.cached])

    @classmethod
    def of(cls, text: str) -> "RankShare":
        refusal, team, cached = json.loads(text)
        return cls(refusal, team, tuple(cached))


def team_of(found: Checkpoint, boot: str) -> str:
    """Of all who see these weights; empty where the kernel does not name itself."""
    if not boot:
        return ""
    seen = (
        (file.path.name, file.layout.header.hex(), *file.stat.key, file.stat.trusted)
        for file in found.weights
    )
    return framed([boot.encode(), *(repr(one).encode() for one in seen)]).hex()


def members(shares: Sequence[RankShare], rank: int) -> list[int]:
    """The ranks of ``rank``'s team."""
    if not shares[rank].team:
        return [rank]
    return [other for other, theirs in enumerate(shares) if theirs.team == shares[rank].team]


def share(pieces: Sequence[Piece], shares: Sequence[RankShare], rank: int) -> list[int]:
    """Numbers of the pieces that ``rank`` hashes: every ``n``th of those that not all members of
    its team have from their caches, and all that is not trusted."""
    team = members(shares, rank)
    everywhere = set.intersection(*(set(shares[member].cached) for member in team))
    wanted = [number for number, piece in enumerate(pieces) if piece.file not in everywhere]
    common = [number for number in wanted if pieces[number].stat.trusted]
    own = [number for number in wanted if not pieces[number].stat.trusted]
    return sorted(common[team.index(rank) :: len(team)] + own)


@dataclass(frozen=True, slots=True)
class HashReport:
    """What a rank reports when it has hashed, loaded and looked again. ``own``: random, where it
    has what cannot be identified; else empty."""

    refusal: str
    digests: Digests
    own: str = ""

    def text(self) -> str:
        found = {number: [one.hex() for one in many] for number, many in self.digests.items()}
        return json.dumps([self.refusal, found, self.own])

    @classmethod
    def of(cls, text: str) -> "HashReport":
        refusal, found, own = json.loads(text)
        return cls(
            refusal,
            {int(number): list(map(bytes.fromhex, many)) for number, many in found.items()},
            own,
        )


def combined(
    pieces: Sequence[Piece], answers: Sequence[HashReport], team: Sequence[int], rank: int
) -> Digests:
    """What ``rank`` has found itself, and of what is trusted what its team has found."""
    return {
        number: digests
        for member in team
        for number, digests in answers[member].digests.items()
        if member == rank or pieces[number].stat.trusted
    }

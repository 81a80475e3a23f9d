"""What each link of a process has of its pages where the two sides have other numbers of ranks.

A side with fewer ranks than its peers has several *lanes* in each process: one for each rank of a
peer that has a part of this process's pages. To the peer a lane is a rank.

Owns which part of which group a lane has, read off the shards of ``spec.sharding``. Pure.
"""

from stratakv.core.errors import ConfigError
from stratakv.core.ids import GroupId
from stratakv.disagg.handshake import Cut, SideRank
from stratakv.spec.sharding import Sharding


def shares(
    own: Sharding, handed_over: Sharding, rank: int, *, receives: bool
) -> tuple[SideRank, ...]:
    """Of rank ``rank`` of ``own``, a lane each. ``handed_over``: the same cache on as many ranks as
    the side with more has. ``receives``: pages are written to this side, and what all ranks have
    alike by one of them. ConfigError where some group's pages are not whole slices."""
    lanes = handed_over.ranks // own.ranks
    assert lanes * own.ranks == handed_over.ranks, "lanes are ranks that others have more"
    groups = [group.id for group in own.whole.groups]
    alike = frozenset(group for group in groups if not handed_over.splits(group))
    found: list[SideRank] = []
    for lane in range(rank * lanes, (rank + 1) * lanes):
        cuts = tuple(_cut(own, handed_over, group, lane) for group in groups)
        out = alike if receives and lane % lanes else frozenset[GroupId]()
        found.append(SideRank(lane, handed_over.ranks, own.whole.digest, cuts, alike, left_out=out))
    return tuple(found)


def _cut(own: Sharding, handed_over: Sharding, group: GroupId, lane: int) -> Cut:
    if own.ranks > 1 and own.splits(group) != handed_over.splits(group):
        name = own.whole.groups[group].name
        raise ConfigError(
            f"--peer-tp {handed_over.ranks}: with --tp {own.ranks} group {name!r} is split "
            f"by heads, with {handed_over.ranks} ranks it is not, or the other way round; "
            f"allowed is --peer-tp {own.ranks}"
        )
    if not handed_over.splits(group):
        return Cut()
    lanes = handed_over.ranks // own.ranks
    return Cut(lane % lanes, lanes)

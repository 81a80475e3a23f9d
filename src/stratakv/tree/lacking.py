"""Which pages a prefix lacks in the groups beside the anchor, and when they left.

Owns the question, which is asked for people alone. Changes nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stratakv.core.ids import GroupId, PageKey
from stratakv.spec.groups import CacheSpec
from stratakv.tree.nodes import TIERS, NodeTable
from stratakv.tree.residency import PRESENT


class Lacking(NamedTuple):
    """Pages of a group that going on needs and that no tier has. ``first``: the first of them.
    ``left_s``: when the last one left the device and the host, 0.0 where none was there.
    ``wanted``: some checkpoint or milestone needs one of them; what is needed nowhere leaves
    first."""

    group: GroupId
    first: int
    pages: int
    left_s: tuple[float, float]
    wanted: bool


def lacking(
    spec: CacheSpec, nodes: NodeTable, starts: Sequence[int], keys: Sequence[PageKey], end: int
) -> list[Lacking]:
    """Of groups that lack any at ``end`` pages, from ``starts[group]`` on. The anchor is there."""
    found: list[Lacking] = []
    if not end:
        return found
    tip = nodes.index[keys[end - 1]]
    for group in spec.groups[1:]:
        rows = nodes.tail(tip, end - starts[group.id])
        absent = np.flatnonzero(~PRESENT[nodes.state[group.id][rows]])
        if len(absent):
            gone = rows[absent]
            device_s, host_s = (float(nodes.left_s[tier][group.id][gone].max()) for tier in TIERS)
            found.append(
                Lacking(
                    group.id,
                    starts[group.id] + int(absent[0]),
                    len(absent),
                    (device_s, host_s),
                    bool(np.any(nodes.need[group.id][gone])),
                )
            )
    return found

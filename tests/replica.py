"""What a follower of events knows: which pages lie where. It refuses news that make no sense."""

from collections import defaultdict
from collections.abc import Hashable, Iterable

from stratakv.tree.prefix_tree import PrefixTree
from stratakv.tree.residency import Residency

R = Residency
READABLE = {
    "GPU": (R.DEVICE, R.SAVING, R.BOTH),
    "CPU": (R.BOTH, R.HOST, R.LOADING),
}


class Replica:
    """``pages[medium, group]``: names of pages, whatever names them."""

    def __init__(self) -> None:
        self.pages: defaultdict[tuple[str, int], set] = defaultdict(set)

    def store(self, medium: str, group: int, names: Iterable[Hashable]) -> None:
        names = list(names)
        assert len(set(names)) == len(names), "a page is stored twice at once"
        held = self.pages[medium, group]
        assert held.isdisjoint(names), f"stored again on {medium}"
        held.update(names)

    def remove(self, medium: str, group: int, names: Iterable[Hashable]) -> None:
        names = set(names)
        assert names <= self.pages[medium, group], f"{medium} loses what it never had"
        self.pages[medium, group] -= names

    def clear(self) -> None:
        self.pages.clear()

    def known(self) -> dict[tuple[str, int], set]:
        return {place: held for place, held in self.pages.items() if held}


def readable(tree: PrefixTree, name=lambda key: key) -> dict[tuple[str, int], set]:
    """The same, from the tree itself."""
    nodes, found = tree.internals.nodes, defaultdict(set)
    for key, row in nodes.index.items():
        for group, states in enumerate(nodes.state):
            for medium, there in READABLE.items():
                if states[row] in there:
                    found[medium, group].add(name(key))
    return dict(found)

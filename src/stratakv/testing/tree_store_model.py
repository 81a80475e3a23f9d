"""What the perfect model knows of a store below the host: what it was given, and what that pins.

Owns the marks, the writes under way and when the store last saw a page. Slow and obvious, as
``tree_model`` is, whose pages it reads. Must not import anything that decides in
``stratakv.tree``.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from stratakv.core.ids import NONE
from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import KeepAll
from stratakv.testing.tree_books import HOST, LeasedPages, PageAt, Prefix, Spot
from stratakv.tree.residency import Residency


class StoreModel:
    """``active``: whether there is a store. ``marked``: what this process knows to be in it.
    ``touched``: when the store last got, gave or was notified of a page."""

    def __init__(
        self,
        spec: CacheSpec,
        nodes: dict[Prefix, list[Spot]],
        checkpointed: Callable[[], set[PageAt]],
    ) -> None:
        self.active = False
        self.marked: set[PageAt] = set()
        self.writing: dict[int, list[PageAt]] = {}
        self.touched: dict[PageAt, int] = {}
        self._spec = spec
        self._nodes = nodes
        self._checkpointed = checkpointed

    def open(self) -> None:
        self.active = True

    def close(self) -> None:
        self.active = False

    def forget(self) -> None:
        self.marked.clear()
        self.touched.clear()

    def readable(self, place: PageAt) -> bool:
        """Whether the host has the bytes of a page, and not only a place for them."""
        spots = self._nodes.get(place[0])
        if spots is None:
            return False
        spot = spots[place[1]]
        return spot.pages[HOST] != NONE and spot.moving != Residency.SAVING

    def reach(self, prompt: Prefix) -> int:
        """How many leading pages of ``prompt`` have a readable anchor page on the host."""
        end = 0
        while end < len(prompt) and self.readable((prompt[: end + 1], 0)):
            end += 1
        return end

    def entered(self, place: PageAt, now: int, *, fetched: bool) -> None:
        self.marked.discard(place)
        if fetched and self.active:
            self.marked.add(place)
            self.touched[place] = now

    def worthy(self, places: Iterable[PageAt]) -> list[PageAt]:
        """Those of ``places`` that a store should get: it has them not, the host does, somebody may
        want them again, and all that is above them can be read there too."""
        if not self.active:
            return []
        wanted = self._checkpointed()
        return [
            (prefix, group)
            for prefix, group in places
            if self._spec.groups[group].page_bytes
            and (prefix, group) not in self.marked
            and self.readable((prefix, group))
            and (self._keeps_all(group) or (prefix, group) in wanted)
            and self.reach(prefix) == len(prefix)
        ]

    def _keeps_all(self, group: int) -> bool:
        return isinstance(self._spec.groups[group].retention, KeepAll)

    def hold(self, prompt: Prefix, starts: Sequence[int]) -> LeasedPages:
        """What of ``prompt`` the host can promise for as long as a request waits."""
        end = self.reach(prompt)
        held = LeasedPages(prompt, end, [min(start, end) for start in starts], retracted=True)
        held.on_host = {place for place in held.places() if self.readable(place)}
        return held

    def begin(self, writer: int, places: list[PageAt], now: int) -> None:
        self.writing[writer] = places
        self.marked.update(places)
        self.touched.update(dict.fromkeys(places, now))

    def end(self, writer: int, kept: Sequence[bool]) -> None:
        for place, there in zip(self.writing.pop(writer), kept, strict=True):
            if not there:
                self.marked.discard(place)

    def pins(self) -> Counter[PageAt]:
        """On the host: what is being written, and the anchor pages of its nodes."""
        pins: Counter[PageAt] = Counter()
        for places in self.writing.values():
            pins.update({place for at, group in places for place in ((at, group), (at, 0))})
        return pins

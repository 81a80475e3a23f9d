"""Where a text that comes in pieces ends at a string. Owns the search; must not know tokens."""

from collections.abc import Sequence


class StopMatcher:
    """Text in, text out, up to the stop string that is complete first (of several that end
    together: the longest), or with it (``keep``). How the text was split into pieces makes no
    difference."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = tuple(stops)
        self._keep = keep
        self._held = ""
        self.matched = False

    def feed(self, piece: str, *, early: bool = False) -> str:
        """What is surely before any stop string; nothing after a match. ``early``: none that ends
        in ``piece`` counts."""
        if not self._stops:
            return piece
        if self.matched or not piece:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found and not early:
            self.matched = True
            self._held = ""
            end, begin = min(found)
            return text[: end if self._keep else begin]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back: there will be no more text."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` with which ``stop`` might begin."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0

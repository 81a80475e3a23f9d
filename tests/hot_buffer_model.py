"""One request's bounded buffer under one selection, in the plainest way: a dict and a list."""

from stratakv.core.ids import NONE


class HotBufferModel:
    """``where[position]`` is the entry that stands there; ``order`` are the positions, the least
    recently used first."""

    def __init__(self, entries):
        self.where = {}
        self.order = list(range(entries))

    def select(self, selection):
        """Positions of what is selected, and [(entry, position)] to copy."""
        there = {entry: position for position, entry in self.where.items()}
        backwards = [entry for entry in reversed(selection) if entry != NONE]
        wanted = list(dict.fromkeys(backwards))[::-1]  # of twins the last
        needed = {there[entry] for entry in wanted if entry in there}
        cold = [position for position in self.order if position not in needed]
        warm = [position for position in self.order if position in needed]
        missing = [entry for entry in wanted if entry not in there]
        loaded, left = cold[: len(missing)], cold[len(missing) :]
        misses = list(zip(missing, loaded, strict=True))
        for entry, position in misses:
            self.where[position], there[entry] = entry, position
        self.order = left + loaded + warm
        return [there[entry] if entry != NONE else NONE for entry in selection], misses

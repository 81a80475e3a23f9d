"""Records of counts, which several parts of one owner add to. Owns how."""


class Counts:
    """A record whose fields are ints that only grow."""

    __slots__ = ()

    def add(self, **counts: int) -> None:
        """So many more of each; AttributeError where there is no such field."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)

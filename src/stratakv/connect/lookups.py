"""Which pages a store has, as an engine asks: page by page, step after step, and it never waits.

Owns the verdicts: what was asked for whom, what is to be asked next, and how long a verdict counts,
which is until the last request that has asked ends. Must not ask: a store is somebody else's. For
one owner thread.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stratakv.core.clock import Clock


@dataclass(slots=True, eq=False)
class _Verdict:
    """``present``: None while nobody knows. ``asked``: the store is being asked."""

    present: bool | None = None
    asked: bool = False
    requests: set[str] = field(default_factory=set[str])


class LookupTable:
    """``patience_s``: a question that has no answer by then counts as no."""

    def __init__(self, clock: Clock, patience_s: float) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._verdicts: dict[bytes, _Verdict] = {}
        self._of_request: dict[str, set[bytes]] = {}
        self._unasked: list[bytes] = []
        self._under_way: deque[tuple[float, Sequence[bytes]]] = deque()

    def lookup(self, key: bytes, request: str) -> bool | None:
        """Whether the store has ``key``; None: it is or will be asked."""
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = _Verdict()
            self._unasked.append(key)
        if request not in verdict.requests:
            verdict.requests.add(request)
            self._of_request.setdefault(request, set()).add(key)
        return verdict.present

    def take_unasked(self) -> Sequence[bytes]:
        """What the store is to be asked now, all at once; each is given once."""
        unasked, self._unasked = dict.fromkeys(self._unasked), []
        keys: list[bytes] = []
        for key in unasked:
            verdict = self._verdicts.get(key)
            if verdict is None:  # decided without the store, and nobody is left who asked
                continue
            if verdict.requests:
                verdict.asked = True
                keys.append(key)
            else:
                del self._verdicts[key]
        if keys:
            self._under_way.append((self._clock.now_s(), keys))
        return keys

    def answer(self, keys: Sequence[bytes], present: Iterable[bool]) -> None:
        """What the store says of ``keys``, which were given by ``take_unasked`` together. What was
        decided meanwhile stays decided."""
        self._under_way = deque(one for one in self._under_way if one[1] is not keys)
        for key, there in zip(keys, present, strict=True):
            verdict = self._verdicts[key]
            verdict.asked = False
            if not verdict.requests:
                del self._verdicts[key]
            elif verdict.present is None:
                verdict.present = bool(there)

    def give_up_late(self) -> int:
        """Call no what is asked for too long; how many pages that are."""
        given_up = 0
        oldest_s = self._clock.now_s() - self._patience_s
        while self._under_way and self._under_way[0][0] <= oldest_s:
            for key in self._under_way.popleft()[1]:
                verdict = self._verdicts.get(key)
                if verdict is not None and verdict.present is None:
                    verdict.present = False
                    given_up += 1
        return given_up

    def mark_missing(self, keys: Iterable[bytes]) -> None:
        """They could not be read: whoever has asked must not ask for them again and again."""
        for key in keys:
            verdict = self._verdicts.get(key)
            if verdict is not None:
                verdict.present = False

    def mark_present(self, keys: Iterable[bytes]) -> None:
        """They were just stored: whoever has asked before need not go without them."""
        for key in keys:
            verdict = self._verdicts.get(key)
            if verdict is not None:
                verdict.present = True

    def release(self, request: str) -> None:
        """A request has ended."""
        for key in self._of_request.pop(request, ()):
            verdict = self._verdicts[key]
            verdict.requests.discard(request)
            # Who is asked about answers once more, and what is to be asked is looked at again.
            if not verdict.requests and not verdict.asked and verdict.present is not None:
                del self._verdicts[key]

    def forget(self) -> None:
        """All verdicts are void: pages have other names from now on."""
        for verdict in self._verdicts.values():
            verdict.present = False

    @property
    def size(self) -> int:
        """How many verdicts are kept."""
        return len(self._verdicts)

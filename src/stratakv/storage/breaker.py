"""When to stop trying and when to try again. Owns the back-off; must not sleep or do I/O."""

from typing import Final

from stratakv.core.clock import Clock

FIRST_S: Final = 1.0
LONGEST_S: Final = 64.0


class Breaker:
    """Off for one second after a failure, for twice as long after each that follows, up to 64 s."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._off_s = 0.0
        self._since_s = 0.0
        self.trips = 0

    @property
    def closed(self) -> bool:
        """Whether trying is allowed. A clock that was set back allows it."""
        return not 0 <= self._clock.now_s() - self._since_s < self._off_s

    def failed(self) -> None:
        self.trips += 1
        self._off_s = min(max(FIRST_S, 2 * self._off_s), LONGEST_S)
        self._since_s = self._clock.now_s()

    def worked(self) -> None:
        self._off_s = 0.0

"""A line of the log for every ten seconds of work: how much runs, and how fast.

Owns the line and its figures, which are differences of what the metrics count. It is asked on the
event loop: the engine's thread is not, and no step waits for it.
"""

import logging
from dataclasses import dataclass, field
from typing import Final

from stratakv.core.clock import Clock
from stratakv.core.logs import DETAILS
from stratakv.serve.driver import EngineDriver
from stratakv.serve.metrics import ServerMetrics, TokenCounts

log = logging.getLogger(__name__)

PERIOD_S: Final = 10.0


@dataclass(slots=True, eq=False)
class ThroughputLog:
    """Nothing is logged of a time in which nothing was to do."""

    driver: EngineDriver
    metrics: ServerMetrics
    clock: Clock
    _at_s: float | None = None
    _before: TokenCounts = field(default_factory=TokenCounts)

    def tick(self) -> None:
        now_s = self.clock.now_s()
        if self._at_s is None:
            self._at_s, self._before = now_s, self.metrics.tokens()
        if now_s < self._at_s + PERIOD_S:
            return
        found, passed_s = self.metrics.tokens(), now_s - self._at_s
        if found != self._before or self.driver.open_requests:
            self._log(found - self._before, passed_s)
        self._at_s, self._before = now_s, found

    def _log(self, tokens: TokenCounts, passed_s: float) -> None:
        waiting = self.driver.waiting
        running = max(0, self.driver.open_prompts - waiting)
        prompt = max(1, tokens.prompt)
        shares = {tier: count / prompt for tier, count in tokens.by_tier.items()}
        details = {
            "running": running,
            "waiting": waiting,
            "prompt_tokens_per_s": round(tokens.prompt / passed_s, 1),
            "generated_tokens_per_s": round(tokens.generated / passed_s, 1),
            "hit_rate": {tier: round(share, 3) for tier, share in shares.items()},
        }
        log.info(
            "running %d, waiting %d, prompts %.1f tokens/s, answers %.1f tokens/s, of the prompts "
            "came from %s",
            running, waiting, tokens.prompt / passed_s, tokens.generated / passed_s,
            ", ".join(f"{tier} {share:.1%}" for tier, share in shares.items()),
            extra={DETAILS: details},
        )  # fmt: skip

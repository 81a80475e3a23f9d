"""``stratakv bench ranks``: what it costs ranks to agree, beside bare collectives of the same size.

Owns the report. All ranks run on this machine, over gloo, as processes that the bench starts and
ends. How a ballot and its yardstick are kept comparable is written in ``ranks_meter``; a figure of
a step is its slowest rank's.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from stratakv.agreement.ballot import LANES
from stratakv.bench.ranks_engine import take_part
from stratakv.bench.ranks_meter import MeterRecord, TimedPart
from stratakv.bench.ranks_processes import on_ranks
from stratakv.core.choices import check_count

TARGET: Final = 1.2
TICK_TARGET: Final = 1.5
STEPS: Final = 2000
LIMIT_S: Final = 300.0
_WARM: Final = 10
"""Of each kind of step, the first ones are not timed: memory is touched for the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksReport:
    """``ballots_per_step`` and ``broadcasts_per_step`` are of the steps that waited for no copy,
    and the count that is farthest from 1 where they differ. ``ballot_us_p50`` is its all-reduce,
    and ``ratio`` that to the bare one; ``digests_us_p50`` what ``agree`` does beside it.
    ``tick_own_us_p50``: of a tick, all but the all-reduce and what is done while it is under way;
    ``tick_ratio``: the whole of it to the bare one. ``tick_plain_us_p50``: of ticks that nothing is
    added to, with the wait for who is late. ``cached_device_tokens`` and
    ``cached_host_tokens``: what prompts found on either tier, the same in every run."""

    ranks: int
    steps: int
    waited_steps: int
    lanes: int
    ballots_per_step: int
    broadcasts_per_step: int
    tick_us_p50: float
    tick_ratio: float
    tick_own_us_p50: float
    digests_us_p50: float
    tick_plain_us_p50: float
    ballot_us_p50: float
    bare_allreduce_us_p50: float
    ratio: float
    broadcast_us_p50: float
    bare_broadcast_us_p50: float
    cached_device_tokens: int
    cached_host_tokens: int


def run(*, tp: int = 2, steps: int = STEPS) -> dict[str, object]:
    """Measure and print. Seconds with two ranks; more than there are cores take much longer.
    ConfigError for fewer than two ranks; RankLostError where one dies or hangs."""
    check_count("--tp", tp, 2)
    report = report_of(on_ranks(tp, take_part, steps, LIMIT_S), steps)
    print(
        f"{tp} ranks, {steps} steps, of which {report.waited_steps} waited for a copy; medians "
        f"in us\n"
        f"per step    {report.ballots_per_step} ballot, {report.broadcasts_per_step} broadcast\n"
        f"ballot      {report.ballot_us_p50:7.0f}  bare all-reduce of {LANES} int64 "
        f"{report.bare_allreduce_us_p50:7.0f}  ratio {report.ratio:.2f} (at most {TARGET})\n"
        f"broadcast   {report.broadcast_us_p50:7.0f}  bare broadcast "
        f"{report.bare_broadcast_us_p50:7.0f}\n"
        f"whole tick  {report.tick_us_p50:7.0f}  ratio {report.tick_ratio:.2f} (at most "
        f"{TICK_TARGET}), beside its all-reduce {report.tick_own_us_p50:.0f}, of which digests "
        f"{report.digests_us_p50:.0f}"
    )
    return asdict(report)


def report_of(records: Sequence[MeterRecord], steps: int) -> RanksReport:
    """From what each rank has measured."""
    p50 = {turn: _p50_us([one.taken_s[turn] for one in records]) for turn in TimedPart}
    ticks_s = [one.taken_s[TimedPart.TICK] for one in records]
    own = [_rest(tick_s, one.met_s) for tick_s, one in zip(ticks_s, records, strict=True)]
    digests = [_rest(one.agreed_s, one.met_s) for one in records]
    return RanksReport(
        ranks=len(records),
        steps=steps,
        waited_steps=records[0].waited,
        lanes=LANES,
        ballots_per_step=_one([one.ballots for one in records]),
        broadcasts_per_step=_one([one.broadcasts for one in records]),
        tick_us_p50=p50[TimedPart.TICK],
        tick_ratio=p50[TimedPart.TICK] / p50[TimedPart.BARE_ALLREDUCE],
        tick_own_us_p50=_p50_us(own),
        digests_us_p50=_p50_us(digests),
        tick_plain_us_p50=p50[TimedPart.NOTHING],
        ballot_us_p50=p50[TimedPart.BALLOT],
        bare_allreduce_us_p50=p50[TimedPart.BARE_ALLREDUCE],
        ratio=p50[TimedPart.BALLOT] / p50[TimedPart.BARE_ALLREDUCE],
        broadcast_us_p50=p50[TimedPart.BROADCAST],
        bare_broadcast_us_p50=p50[TimedPart.BARE_BROADCAST],
        cached_device_tokens=records[0].cached_device_tokens,
        cached_host_tokens=records[0].cached_host_tokens,
    )


def _one(counts: Sequence[Sequence[int]]) -> int:
    """What every step of every rank has, or the worst of them: a mean would hide 0 and 2."""
    return max((count for rank in counts for count in rank), key=lambda count: abs(count - 1))


def _rest(whole_s: Sequence[float], part_s: Sequence[float]) -> list[float]:
    return [whole - part for whole, part in zip(whole_s, part_s, strict=True)]


def _p50_us(taken_s: Sequence[Sequence[float]]) -> float:
    """Median over steps of the slowest rank's; a short run is timed as it is."""
    slowest = np.array(taken_s).max(axis=0) * 1e6
    return float(np.median(slowest[_WARM:] if len(slowest) > 2 * _WARM else slowest))

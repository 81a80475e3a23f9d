"""The line for every ten seconds of work."""

import logging
from dataclasses import dataclass

from stratakv.core.ids import GroupId
from stratakv.core.logs import DETAILS
from stratakv.engine.request import CachedTokens
from stratakv.serve.metrics import ServerMetrics
from stratakv.serve.throughput import PERIOD_S, ThroughputLog


@dataclass
class Work:
    """A driver with so many requests, and a clock."""

    waiting: int = 0
    open_prompts: int = 0
    open_requests: int = 0
    at_s: float = 100.0

    def now_s(self):
        return self.at_s


def lines_of(caplog):
    found = [vars(record)[DETAILS] for record in caplog.records]
    caplog.clear()
    return found


def test_a_line_has_the_figures_of_its_ten_seconds_and_none_is_of_idle_ones(caplog):
    caplog.set_level(logging.INFO, "stratakv.serve.throughput")
    metrics, work = ServerMetrics({GroupId(0): "full"}, "m"), Work()
    throughput = ThroughputLog(work, metrics, work)
    cached = CachedTokens(
        device=300, host=100, storage=0, groups_device=(300,), groups_host=(100,),
        groups_storage=(0,),
    )  # fmt: skip

    def later(seconds):
        work.at_s += seconds
        throughput.tick()

    metrics.prompted(77, None)  # before the first look
    later(0)
    later(PERIOD_S)
    assert lines_of(caplog) == []

    metrics.prompted(1000, cached)
    metrics.first_token_s.observe(0.1)
    for _ in range(49):
        metrics.between_tokens_s.observe(0.1)
    work.open_requests, work.open_prompts, work.waiting = 2, 3, 1
    later(PERIOD_S / 2)
    assert lines_of(caplog) == []
    later(PERIOD_S / 2)
    assert lines_of(caplog) == [{
        "running": 2, "waiting": 1, "prompt_tokens_per_s": 100.0, "generated_tokens_per_s": 5.0,
        "hit_rate": {"device": 0.3, "host": 0.1, "storage": 0.0},
    }]  # fmt: skip

    later(2 * PERIOD_S)  # a request that gets nothing is work too
    assert [line["generated_tokens_per_s"] for line in lines_of(caplog)] == [0.0]
    work.open_requests = work.open_prompts = work.waiting = 0
    later(PERIOD_S)
    assert lines_of(caplog) == []

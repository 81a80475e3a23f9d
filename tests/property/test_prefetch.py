"""Every decision of a prefetch beside a model that loops over pages: any spec, any host fill."""

import random
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratakv.policy.prefetch_reasons import Reason
from tests.prefetch_model import Walk


@given(st.randoms(use_true_random=False))
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_prefetch_decides_as_the_model_does(rng):
    Walk(rng).run()


def test_random_walks_take_every_way_out():
    ways = Counter(Walk(random.Random(seed)).run() for seed in range(1500))
    wanted = {
        None, Reason.BELOW_THRESHOLD, Reason.RATE_LIMITED, Reason.HOST_CAPACITY, Reason.ABORTED,
        Reason.DEADLINE, Reason.EVICTED, Reason.CORRUPT, Reason.IO_ERROR, Reason.SHARD_DISAGREEMENT,
    }  # fmt: skip
    assert set(ways) == wanted
    assert min(ways.values()) >= 3, ways

"""Walks of the whole engine without a model, cut short: what ``make mutants`` looks at first for
``cache/``, ``tiers/`` and ``tiers/prefetch/``. Each ends with every page free.
"""

import logging
from random import Random

import pytest

from stratakv.spec.retention import KeepBoundary, KeepWindow
from stratakv.testing.specs import small_spec
from stratakv.testing.storage_faults import Faults
from tests.churn import Traffic
from tests.engines import expected_tokens, greedy
from tests.integration.test_storage_churn import FAULTS, SPECS, Operator, churn
from tests.pairs import token_pair
from tests.property.test_bytes_under_the_engine import converse

BYTES = {
    "anchor": small_spec([], page_tokens=3),
    "window": small_spec([KeepWindow(7)], page_tokens=2),
    "all": small_spec([KeepBoundary(), KeepWindow(5)], page_tokens=4, anchor_bytes=False),
}
DAY = ["ask", "retract", "off the device", "ask", "off both", "ask", "retract", "ask"]


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="stratakv")


@pytest.mark.parametrize("spec", BYTES.values(), ids=BYTES)
def test_every_page_is_what_its_tokens_say(spec):
    converse(spec, DAY, 1)


@pytest.mark.parametrize("name", ["all", "state alone", "window"])
def test_traffic_over_a_store_with_faults(name):
    traffic = Traffic(seed=7, requests=14, aborts=0.05, check_every=2)
    operator = Operator(SPECS[name], 7, FAULTS, quota_bytes=20_000)
    churn(SPECS[name], 14, traffic, operator, prefetch_policy="timeout")


@pytest.mark.parametrize("name", ["all", "chunk"])
def test_traffic_over_a_good_store(name):
    traffic = Traffic(seed=3, requests=16, check_every=2)
    operator = Operator(SPECS[name], 3, Faults(), quota_bytes=1 << 20, prompt=True)
    churn(SPECS[name], 10, traffic, operator, prefetch_policy="wait-complete")


@pytest.mark.parametrize("host", [0, 60])
def test_requests_change_engines_while_pages_run_short(host):
    draw = Random(5)
    prompt = [n * 7 % 97 for n in range(60)]
    with token_pair(KeepBoundary(), KeepWindow(6), device=28, host=host, reserve_tokens=1) as pair:
        pair.link.slow(draw, most=3)
        asked = [
            greedy(f"{n}", prompt[: draw.randrange(1, 50)], draw.randrange(4, 30)) for n in range(6)
        ]
        generated = pair.run(*asked)
        for one, answer in zip(asked, generated, strict=True):
            assert answer == expected_tokens(one.tokens, one.sampling.max_tokens)
        pair.assert_nothing_left()

"""Retraction and resume on real models: tokens and logits are those of a request that nobody ever
took off the device, and where the host held what it needs, nothing was computed twice.
"""

import pytest

from scripts.family_table import exact
from stratakv.core.ids import RequestId
from stratakv.policy.admission import demand
from stratakv.spec.derive import spec_of
from tests.engines import evict_device
from tests.exact_families import case, stateful
from tests.hit_cases import engine_model, lab, prompt

PAGE = 16
PROMPTS = (44, 51, 39)
OUTPUT = 40


def tight(spec):
    """Device pages: of the anchor for one request and a half, of the others for all three."""
    longest = max(PROMPTS) + OUTPUT
    anchor, *others = demand(spec, longest, longest, 40, 0).peak
    return (anchor + 4, *(3 * pages for pages in others))


def serve(family, host):
    spec = spec_of(engine_model(family).config, page_tokens=PAGE, dtype="float32")
    device = tight(spec)
    settings = {
        "device": device,
        "host": tuple(host * pages for pages in device),
        "cache": "host" if host else "device",
        "reserve_tokens": 1,
        "snapshot_tokens": PAGE,
    }
    with lab(family, PAGE, **settings) as this:
        for at, tokens in enumerate(PROMPTS):
            this.submit(f"r{at}", prompt(PAGE, at, tokens), count=OUTPUT)
        this.drain()
        counters = this.parts.cache.tiers.pools.counters
        return counters, this.recorder.computed_tokens - sum(PROMPTS) - 3 * (OUTPUT - 1)


FEW = (
    "llama",
    "gemma3_text",
    "llama4_text",
    "deepseek_v3",
    "deepseek_v4",
    "qwen3_next",
    "falcon_h1",
)
"""One of each retention rule, and two together; in `make test-long` every family."""


@pytest.mark.parametrize("family", [case(family, FEW) for family in exact()])
def test_a_retracted_request_goes_on_where_it_was(family):
    counters, twice = serve(family, host=4)
    assert counters.retracted > 0
    assert counters.retracted_unsaved == 0
    assert twice == 0, "a token was computed twice"


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "deepseek_v3", "llama4"])
def test_without_a_host_it_is_recomputed(family):
    counters, twice = serve(family, host=0)
    assert counters.retracted == counters.retracted_unsaved > 0
    assert twice > 0


@pytest.mark.parametrize("family", [case(family, FEW) for family in exact() if stateful(family)])
@pytest.mark.parametrize("computed", [64, 69])
def test_a_state_goes_on_from_the_host_on_and_off_a_page_boundary(family, computed):
    with lab(family, PAGE, snapshot_tokens=PAGE, reserve_tokens=1) as this:
        engine = this.parts.engine
        this.submit("r", prompt(PAGE, 1, 44), count=OUTPUT)
        this.step()
        name = RequestId("r")
        while engine.status(name).computed < computed:
            this.step()
        assert engine.status(name).computed == computed
        engine.retract(name)
        engine.check()
        request = engine.status(name)
        assert request.retracted.tokens == computed
        retracted = {page.group for page in request.retracted.live}
        states = {group.id for group in this.spec.groups if group.stateful}
        assert (states <= retracted) if computed % PAGE else not (states & retracted)
        evict_device(this.parts)
        this.drain()
        assert this.parts.cache.tiers.pools.counters.load_pages > 0
        assert this.recorder.computed_tokens == 44 + OUTPUT - 1, "a token was computed twice"

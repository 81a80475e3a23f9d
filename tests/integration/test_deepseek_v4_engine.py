"""DeepSeek-V4 under the whole engine: hit on the device, loaded from the host, retracted off a page
boundary and in batches, its tokens and logits are those of a run without a cache."""

from contextlib import contextmanager

import pytest
import torch

from stratakv.core.config import EngineConfig
from stratakv.core.ids import RequestId
from stratakv.engine.verify.session import Scribe
from stratakv.spec.derive import spec_of
from tests.engines import evict_device, on_device, on_host, on_storage, small_engine
from tests.fixtures.deepseek_v4 import CLEAR, adopted, clearness, hugging_face, prompt_of
from tests.hit_cases import Lab
from tests.storage_cases import attach, check_sums, file_url

PAGE = 128
PLENTY = 24


@contextmanager
def lab(seed=0, device=None, host=None, **settings):
    torch.set_num_threads(1)
    model = adopted(seed)
    groups = len(spec_of(model.config, page_tokens=PAGE, dtype=model.dtype).groups)
    config = EngineConfig(
        page_tokens=PAGE, max_running=6, max_model_len=1024, chunk_tokens=150, step_tokens=310,
        **settings,
    )  # fmt: skip
    plenty = (PLENTY,) * groups
    pages = (plenty if device is None else device, plenty if host is None else host)
    scribe = Scribe()
    with small_engine(model, config, *pages, token_source=scribe) as parts:
        yield ClearLab(seed, parts, scribe)


class ClearLab(Lab):
    """Refuses prompts and answers on which rounding could decide what an indexer selects."""

    def __init__(self, seed, parts, scribe):
        super().__init__(hugging_face(seed), parts, scribe)
        self.seed = seed

    def compare(self, tokens, reply):
        super().compare(tokens, reply)
        assert clearness(self.seed, (*tokens, *reply.tokens)) > CLEAR

    def prompt(self, number, tokens=300):
        return prompt_of(self.seed, number, tokens).tolist()


@pytest.mark.parametrize("seed", [0, 1, 3])
@pytest.mark.parametrize("tokens", [257, 300, 384])
def test_a_prompt_is_hit_on_the_device_and_loaded_from_the_host(seed, tokens):
    with lab(seed) as this:
        asked, end = this.prompt(1, tokens), (tokens - 1) // PAGE * PAGE
        assert this.ask(asked).cached == on_device(this.spec, 0)
        assert this.ask(asked).cached == on_device(this.spec, end)
        evict_device(this.parts)
        assert this.ask(asked).cached == on_host(this.spec, end)


def test_turns_of_a_conversation_with_eviction_between_them():
    with lab(1) as this:
        tokens, known = this.prompt(9, 140), 0
        for turn in range(4):
            reply = this.ask(tokens, count=6)
            assert reply.cached.host == known
            known = (len(tokens) + 5) // PAGE * PAGE
            tokens = [*tokens, *reply.tokens, *this.prompt(100 + turn, 133)]
            evict_device(this.parts)


def test_a_ragged_batch_in_different_phases():
    with lab(3) as this:
        known = this.prompt(1)
        this.ask(known)
        evict_device(this.parts)
        this.submit("short", this.prompt(10, 5), count=12)
        this.step()
        this.submit("fresh", this.prompt(8, 280), count=6)
        this.submit("one", [7], count=9)
        this.step()
        this.submit("loaded", known, count=5)
        this.submit("exact", this.prompt(11, 256), count=5)
        this.drain()
        assert this.answers["loaded"].cached.host == 256


@pytest.mark.parametrize("computed", [256, 257, 270, 255])
def test_a_retracted_request_takes_its_open_blocks_along(computed):
    with lab(0, reserve_tokens=1) as this:
        engine = this.parts.engine
        this.submit("r", this.prompt(1, 250), count=40)
        this.step()
        name = RequestId("r")
        while engine.status(name).computed < computed:
            this.step()
        engine.retract(name)
        engine.check()
        request = engine.status(name)
        (live,) = [group.id for group in this.spec.groups if group.stateful]
        assert (live in {page.group for page in request.retracted.live}) == (computed % PAGE > 0)
        evict_device(this.parts)
        this.drain()
        assert this.recorder.computed_tokens == 250 + 40 - 1, "a token was computed twice"


def test_requests_that_do_not_fit_together_are_retracted_and_go_on():
    with lab(0, device=(5, 12, 3), host=(20, 48, 12), reserve_tokens=1) as this:
        for at, tokens in enumerate((200, 230, 120)):
            this.submit(f"r{at}", this.prompt(at, tokens), count=90)
        this.drain()
        counters = this.parts.cache.tiers.pools.counters
        assert counters.retracted > 0
        assert counters.retracted_unsaved == 0
        assert this.recorder.computed_tokens == 200 + 230 + 120 + 3 * 89


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_after_a_restart_a_prompt_comes_from_storage(seed, tmp_path):
    """Also one that goes on where the first conversation ended."""
    more = {"prefetch_policy": "wait-complete", "prefetch_threshold": 1}
    with lab(seed, **more) as this:
        attach(this.parts, file_url(tmp_path))
        asked = this.prompt(1, 300)
        answer = this.ask(asked, count=90)
    with lab(seed, **more) as this:
        attach(this.parts, file_url(tmp_path))
        assert this.ask(asked).cached == on_storage(this.spec, 256)
    with lab(seed, **more) as this:
        attach(this.parts, file_url(tmp_path))
        longer = [*asked, *answer.tokens, *this.prompt(2, 20)]
        assert this.ask(longer).cached == on_storage(this.spec, 384)
        check_sums(this)

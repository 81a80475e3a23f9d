"""Pages that another engine reads stay where they are and what they are until it has them, whatever
else happens to the same prefix here meanwhile.
"""

import numpy as np
import pytest

from stratakv.assembly.build import Sockets
from stratakv.core.config import EngineConfig
from stratakv.core.ids import LayerId, RequestId
from stratakv.engine.request import Phase
from stratakv.engine.roles import ChunkComputed, MayStart, Sent, Start, UnifiedRole
from stratakv.policy.admission import demand
from stratakv.spec.retention import KeepWindow, handed_over
from tests.engines import VOCABULARY, drain, evict_device, greedy, run, token_engine, token_spec

PAGE = 4


class Lender(UnifiedRole):
    """Sends the prompt of "B", which nobody takes before ``take``. ``lent``: each part of it, new
    ones last."""

    def __init__(self):
        self.lent, self.ends = [], []

    def computed(self, request, computed, pages):
        if request.id != "B":
            return super().computed(request, computed, pages)
        self.lent.append(pages())
        return Phase.PREFILLING if isinstance(computed, ChunkComputed) else Phase.TRANSFERRING

    def take(self):
        self.ends = [Sent("B")]

    def poll(self):
        ends, self.ends = self.ends, []
        return ends


def assert_lent(parts, lent, tokens):
    """Every page that the other engine reads holds what it is read for."""
    for part in lent:
        for group, pages in zip(parts.spec.groups, part.groups, strict=True):
            first, stop = pages.first * PAGE, (pages.first + len(pages.pages)) * PAGE
            assert first == handed_over(group.retention, len(tokens), PAGE).start * PAGE
            bytes_of = parts.pools.layer(group.id, "tokens", LayerId(group.id)).numpy()
            held = bytes_of[pages.pages].reshape(-1)
            assert held[: len(tokens) - first].tolist() == tokens[first:stop], group.name


@pytest.mark.parametrize("more", [0, 5, 12], ids=["the end", "one chunk more", "two chunks more"])
def test_a_load_of_what_is_being_sent_frees_none_of_its_pages(more):
    """B, which hits A's milestone at 16 pages, computes two pages of its prompt, the last ones or
    not, in the step that begins to load them for A: there are two pages for one place until the
    load has landed."""
    spec, role = token_spec(PAGE, KeepWindow(56)), Lender()
    rng = np.random.default_rng(5)
    known = rng.integers(0, VOCABULARY, 64 * PAGE + 1).tolist()
    sent, beginning = known[: 20 * PAGE + more], known[: 32 * PAGE + 1]
    settings = EngineConfig(
        page_tokens=PAGE, max_running=4, max_model_len=400, chunk_tokens=8, step_tokens=15
    )
    window = 2 * demand(spec, 320, 320, 8, 0).peak[1]
    sockets = Sockets(role=lambda: role)
    with token_engine(spec, settings, (200, window), (300, 300), sockets=sockets) as parts:
        run(parts, greedy("A", known, 1))
        evict_device(parts)
        duplicates = parts.cache.tiers.pools.counters.duplicate_pages
        parts.engine.submit(greedy("B", sent, 5))
        parts.engine.step()
        parts.engine.submit(greedy("A again", beginning, 1))
        parts.engine.step()
        for _ in range(6):
            assert_lent(parts, role.lent, sent)
            parts.engine.step()
            parts.engine.check()
        assert len(role.lent[-1].groups[0].pages) == -(-len(sent) // PAGE)
        assert parts.cache.tiers.pools.counters.duplicate_pages > duplicates
        role.take()
        drain(parts)


class Elsewhere(UnifiedRole):
    """Requests whose names begin with w wait for another engine, until ``come`` names them."""

    def __init__(self):
        self.asked, self.come = [], set()

    def may_start(self, request):
        self.asked.append(request.id)
        waits = request.id.startswith("w") and request.id not in self.come
        return Start.WAIT if waits else Start.COMPUTE

    def poll(self):
        return [MayStart(name) for name in sorted(self.come)]


def test_any_number_of_requests_that_wait_for_another_engine_hold_up_nobody():
    """And cost nothing: they are asked about once, and again when there is a word of them."""
    spec, settings = token_spec(PAGE), EngineConfig(page_tokens=PAGE, max_model_len=40)
    role = Elsewhere()
    with token_engine(spec, settings, (50,), (0,), sockets=Sockets(role=lambda: role)) as parts:
        for n in range(200):
            parts.engine.submit(greedy(f"w{n}", [n % 90, 1, 2], 1))
        parts.engine.submit(greedy("r", [1, 2, 3], 1))
        assert [output.request for output in parts.engine.step()] == ["r"]
        assert parts.engine.stats().waiting == 200
        assert len(role.asked) == 201
        role.asked.clear()
        parts.engine.step()
        role.come.update(["w7", "w100"])
        assert parts.engine.step() == []
        parts.engine.abort(RequestId("w8"))
        assert [one.request for one in parts.engine.step() if one.token is not None] == [
            *role.asked
        ]
        assert role.asked == ["w7", "w100"]
        assert parts.engine.stats().waiting == 197

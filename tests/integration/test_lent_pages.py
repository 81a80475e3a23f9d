"""Pages that another engine reads stay where they are and what they are until it has them, whatever
else happens to the same prefix here meanwhile.
"""

import numpy as np

from stratakv.assembly.build import Sockets
from stratakv.core.config import EngineConfig
from stratakv.core.ids import LayerId
from stratakv.engine.request import Phase
from stratakv.engine.roles import Sent, UnifiedRole
from stratakv.policy.admission import demand
from stratakv.spec.retention import KeepWindow, needed
from tests.engines import VOCABULARY, drain, evict_device, greedy, run, token_engine, token_spec

PAGE = 4


class Lender(UnifiedRole):
    """Sends the prompt of "B", which nobody takes before ``take``."""

    def __init__(self):
        self.lent, self.ends = None, []

    def prefilled(self, request, first, pages):
        if request.id != "B":
            return super().prefilled(request, first, pages)
        self.lent = pages()
        return Phase.TRANSFERRING

    def take(self):
        self.ends = [Sent("B")]

    def poll(self):
        ends, self.ends = self.ends, []
        return ends


def assert_lent(parts, lent, tokens):
    """Every page that the other engine reads holds what it is read for."""
    for group, pages in zip(parts.spec.groups, lent.groups, strict=True):
        span = needed(group.retention, len(tokens), PAGE)
        bytes_of = parts.pools.layer(group.id, "tokens", LayerId(group.id)).numpy()
        held = bytes_of[pages.pages].reshape(-1)
        assert held.tolist() == tokens[span.start * PAGE : span.stop * PAGE], group.name


def test_a_load_of_what_is_being_sent_frees_none_of_its_pages():
    """B, which hits A's milestone at 16 pages, computes the last two of its prompt in the step that
    begins to load them for A: there are two pages for one place until the load has landed."""
    spec, role = token_spec(PAGE, KeepWindow(56)), Lender()
    rng = np.random.default_rng(5)
    known = rng.integers(0, VOCABULARY, 64 * PAGE + 1).tolist()
    sent, beginning = known[: 20 * PAGE], known[: 32 * PAGE + 1]
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
        assert role.lent is not None
        for _ in range(3):
            assert_lent(parts, role.lent, sent)
            parts.engine.step()
            parts.engine.check()
        assert parts.cache.tiers.pools.counters.duplicate_pages > duplicates
        role.take()
        drain(parts)

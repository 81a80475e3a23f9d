"""An ``OffloadCase`` on a device that runs ahead: no page is poisoned once a step may read it."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from stratakv.assembly.engine_plan import EnginePlan
from stratakv.assembly.models import assemble
from stratakv.assembly.sizing import Sizes, buffer_rows, spec_for
from stratakv.transfer.cuda_host_rows import CudaHostRows


class Lent:
    """Host rows of a GPU; ``seen`` gets each route that a swap-in follows next, when it does."""

    def __init__(self, host, seen):
        assert type(host) is CudaHostRows
        self.load, self.load_pages, self.pages = host.load, host.load_pages, host.pages
        self._route, self._seen = host.route, seen

    def route(self, layer):
        route = self._route(layer)
        self._seen(route)
        return route


def lending(device, seen):
    """``device``, of which ``seen`` is told what rows of host pages its swap-ins follow."""
    return replace(device, host_rows=lambda *parts: Lent(device.host_rows(*parts), seen))


@contextmanager
def ahead(case, buffer, device, host, model=None):
    """``device``: holds the selected rows of one request, spilled. ``host``: its host pages, NaN at
    first. ``model``: the case's, where ``device`` runs it."""
    model = case.model if model is None else model
    config = case.config(buffer, device="cuda")
    chunk = -(-config.chunk_tokens // config.page_tokens)
    pages = case.pages(case.least(buffer) + chunk, host)
    spec, rows = spec_for(model.facts, config), buffer_rows(model.facts, config)
    sizes = Sizes.of(spec, *pages, config.max_model_len, rows)
    plan = EnginePlan.of(
        config, sizes, model.fingerprint, model.adapters.digests,
        steps_at_once=device.steps_at_once,
    )  # fmt: skip
    parts = assemble(model, plan, device=device)
    for arena in parts.arenas:
        arena.poison(np.arange(arena.pages, dtype=np.int32))
    try:
        yield parts
    finally:
        parts.close()

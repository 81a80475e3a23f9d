"""A store and a transfer engine of somebody else, run through the public suite in a few lines; and
what it says of those that are wrong. What is wrong here every other suite would have to look for.
"""

from typing import ClassVar

import numpy as np
import pytest
import torch

from stratakv.cache.admit import Admitter
from stratakv.engine.loop import Runner
from stratakv.engine.verify import Settings, Verifier
from stratakv.engine.verify_report import Differs, Exact, NotRun, Report, Way
from stratakv.engine.verify_session import Reply
from stratakv.serve import wiring
from stratakv.storage.backend import StoreFormat
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.hit_equals_recompute import HitEqualsRecompute, prompts
from stratakv.transfer.copier import Route
from stratakv.transfer.cpu import DEFAULT_COPIER, CpuTransferEngine
from stratakv.tree.matching import NO_MATCH

STORED = (Way.STORAGE, Way.RESTART)


class Shelf(MemoryBackend):
    """Outlives the engines that close it."""

    def close(self) -> None:
        pass


class TestAStoreOfSomebodyElse(HitEqualsRecompute):
    shelf: ClassVar[Shelf | None] = None

    def backend(self, form: StoreFormat) -> Shelf:
        cls = type(self)
        cls.shelf = cls.shelf or Shelf(form, 1 << 30)
        return cls.shelf


class Copier:
    """Of a third party: whole pages, as it is told."""

    def gather(self, route: Route, device, host) -> None:
        DEFAULT_COPIER.gather(route, device, host)

    def scatter(self, route: Route, device, host) -> None:
        DEFAULT_COPIER.scatter(route, device, host)


class TestATransferEngineOfSomebodyElse(HitEqualsRecompute):
    ways = tuple(way for way in Way if way not in STORED)
    copier: ClassVar[Copier] = Copier()

    def transfer(self, spec, pools, arenas):
        return CpuTransferEngine(spec, pools, arenas, self.copier)


# -- it has teeth --------------------------------------------------------------------------------


class SwappedPages(Shelf):
    """Takes one page for another of its size, of another prompt, whose checksum is right. (To swap
    two pages of one prompt would prove nothing: keys carry their positions, so full attention does
    not mind the order.)"""

    def read(self, keys, into):
        others = [key for key in self._objects if key.group == 0 and key not in keys]
        at = next(at for at, key in enumerate(keys) if key.group == 0)
        return super().read([*keys[:at], *others[:1], *keys[at + 1 :]], into)


class LastPageForgotten(Copier):
    def scatter(self, route, device, host):
        super().scatter(route, device[:-1], host[:-1])


class LastPageTwice(Copier):
    def gather(self, route, device, host):
        device = device.copy()
        device[-1:] = device[:1]
        super().gather(route, device, host)


class Ours(HitEqualsRecompute):
    pass


class BadStore(TestAStoreOfSomebodyElse):
    shelf = None

    def backend(self, form):
        cls = type(self)
        cls.shelf = cls.shelf or SwappedPages(form, 1 << 30)
        return cls.shelf


def verified(suite: HitEqualsRecompute, ways: tuple[Way, ...]) -> Report:
    type(suite).ways = ways
    return suite.verified((150, 81))


def differing(report: Report) -> set[Way]:
    return {found.way for found in report.findings if isinstance(found.verdict, Differs)}


def test_a_store_that_swaps_two_pages_is_caught_wherever_it_is_read():
    report = verified(BadStore(), (Way.COMPUTED, Way.HOST, *STORED))
    assert differing(report) == set(STORED)
    assert not report.exact


@pytest.mark.parametrize("copier", [LastPageForgotten(), LastPageTwice()])
def test_a_transfer_engine_that_copies_one_page_wrongly_is_caught(copier):
    class Bad(TestATransferEngineOfSomebodyElse):
        pass

    Bad.copier = copier
    report = verified(Bad(), (Way.COMPUTED, Way.DEVICE, Way.HOST, Way.STORAGE))
    assert differing(report) == {Way.HOST}
    assert report[Way.STORAGE].verdict == NotRun("there is no storage")


class Drifting:
    """A model whose answer after a hit is a little another: what starts late is off by 1e-4."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner

    def forward(self, batch):
        logits = self._inner.forward(batch)
        late = (batch.counts > 1) & (batch.starts % 40 != 0)  # chunks of 40 begin at multiples
        off = torch.from_numpy(np.where(late[batch.sampled], 1e-4, 0.0)).to(logits)
        return logits + off[:, None] * logits.abs().amax(dim=1, keepdim=True)


def test_a_model_whose_cached_path_differs_is_caught(monkeypatch):
    plain = wiring.runner_of
    monkeypatch.setattr(wiring, "runner_of", lambda *what: Drifting(plain(*what)))
    report = verified(Ours(), (Way.COMPUTED, Way.DEVICE, Way.HOST))
    assert differing(report) == {Way.DEVICE, Way.HOST}
    verdict = report[Way.DEVICE].verdict
    assert isinstance(verdict, Differs)
    assert (verdict.prompt, verdict.token) == (0, 0)
    assert 1e-5 < verdict.error < 1e-3
    assert isinstance(report[Way.COMPUTED].verdict, Exact)


def test_what_should_have_been_reused_and_was_not_is_caught(monkeypatch):
    monkeypatch.setattr(Admitter, "match", lambda *_: NO_MATCH)
    report = verified(Ours(), (Way.COMPUTED, Way.DEVICE))
    verdict = report[Way.DEVICE].verdict
    assert isinstance(verdict, Differs)
    assert verdict.token is None
    assert "reused" in verdict.what


def test_an_oracle_of_ones_own_takes_the_place_of_the_uncached_run():
    suite = HitEqualsRecompute()
    model = suite.model()
    asked = []

    def liar(tokens, count):
        asked.append(len(tokens))
        return Reply(tuple(range(count)), torch.ones(count, model.vocab_size), 0.0)

    settings = Settings(bound=1.0, salt="x")
    verifier = Verifier(suite.start(model), prompts(model.vocab_size, (40,)), settings, liar)
    assert not verifier.run((Way.COMPUTED,)).exact
    assert asked == [40]

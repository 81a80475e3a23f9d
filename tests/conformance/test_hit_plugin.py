"""A store, a transfer engine and a model of somebody else, run through the public suite in a few
lines; and what it says of those that are wrong. What is wrong here every other suite would have to
look for.
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from stratakv.assembly import device as devices
from stratakv.cache.admit import Admitter
from stratakv.engine.executor import Runner
from stratakv.engine.verify.claims import Settings, Verifier, cut_sizes
from stratakv.engine.verify.report import Differs, Exact, NotRun, VerifyReport, Way
from stratakv.engine.verify.session import VerifyOutput
from stratakv.spec.derive import spec_of
from stratakv.storage.backend import StoreFormat
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.hit_equals_recompute import HitEqualsRecompute, prompts
from stratakv.transfer.copier import CopyRoute
from stratakv.transfer.cpu import DEFAULT_COPIER, CpuTransferEngine
from stratakv.tree.matching import NO_MATCH
from tests.conformance.test_storage_plugin import BACKEND, install
from tests.fixtures.bounds import bound_of_model
from tests.fixtures.models import reference_greedy
from tests.fixtures.models import tiny_model as model_of

STORED = (Way.STORAGE, Way.STORAGE_TURN, Way.STORAGE_BATCHED, Way.RESTART)
ELSEWHERE = (Way.COMPUTED, Way.CUT)
"""What neither a store nor a copy has a part in."""


class Shelf(MemoryBackend):
    """Outlives the engines that close it."""

    def close(self) -> None:
        pass


class TestAStoreOfSomebodyElse(HitEqualsRecompute):
    ways = tuple(way for way in Way if way not in ELSEWHERE)
    shelf: ClassVar[Shelf | None] = None

    def backend(self, form: StoreFormat) -> Shelf:
        cls = type(self)
        cls.shelf = cls.shelf or Shelf(form, 1 << 30)
        return cls.shelf


class Copier:
    """Of a third party: whole pages, as it is told."""

    def gather(self, route: CopyRoute, device, host) -> None:
        DEFAULT_COPIER.gather(route, device, host)

    def scatter(self, route: CopyRoute, device, host) -> None:
        DEFAULT_COPIER.scatter(route, device, host)


class TestATransferEngineOfSomebodyElse(HitEqualsRecompute):
    ways = tuple(way for way in Way if way not in (*ELSEWHERE, *STORED))
    copier: ClassVar[Copier] = Copier()

    def transfer(self, spec, pools, arenas):
        return CpuTransferEngine(spec, pools, arenas, self.copier)


class Ours(HitEqualsRecompute):
    pass


class TestAStoreByItsUrl(HitEqualsRecompute):
    ways = (Way.HOST, *STORED)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def place(cls, tmp_path_factory):
        cls.storage = f"file://{tmp_path_factory.mktemp('store')}?quota=64MiB"


class TestAModelDirectory(HitEqualsRecompute):
    """With a state beside attention, as it was saved."""

    ways = (Way.COMPUTED, Way.CUT, Way.DEVICE, Way.TURN, Way.HOST)
    bound = bound_of_model(model_of("qwen3_next"))
    lengths = (70, 40)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def saved(cls, tmp_path_factory):
        cls.directory = tmp_path_factory.mktemp("model")
        model_of("qwen3_next").save_pretrained(cls.directory)


def test_what_a_directory_says_is_what_hugging_face_says(tmp_path):
    """So it is that directory's model which was tried, and every weight of it."""
    model = model_of("llama")
    model.save_pretrained(tmp_path)

    class Saved(HitEqualsRecompute):
        directory = tmp_path

    suite = Saved()

    def hugging_face(tokens, count):
        generated, logits = reference_greedy(model, tokens.tolist(), count)
        return VerifyOutput(tuple(generated), logits, 0.0)

    settings = Settings(bound=bound_of_model(model), salt="x", cuts=(1, 17))
    asked = prompts(model.config.vocab_size, (40,))
    report = Verifier(suite.start(suite.model()), asked, settings, hugging_face).run(
        (Way.COMPUTED, Way.CUT, Way.HOST)
    )
    assert report.exact, report
    assert not any(isinstance(found.verdict, NotRun) for found in report.results)


def test_a_store_whose_scheme_a_package_adds(tmp_path, monkeypatch):
    install(tmp_path, BACKEND)
    monkeypatch.syspath_prepend(tmp_path / "site")

    class Theirs(Ours):
        storage = f"acme://{tmp_path}"

    report = verified(Theirs(), STORED)
    assert report.exact, report
    assert not any(isinstance(found.verdict, NotRun) for found in report.results)


def test_the_order_of_the_ways_does_not_matter():
    class Theirs(TestAStoreOfSomebodyElse):
        shelf = None

    ways = (Way.STORAGE, Way.HOST, Way.DEVICE, Way.BATCHED, Way.TURN, Way.RESTART, Way.RETRACTED)
    report = verified(Theirs(), (*ways, Way.COMPUTED, Way.HOST), (81, 40))
    assert report.exact, report
    assert not any(isinstance(found.verdict, NotRun) for found in report.results)


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


class BadStore(TestAStoreOfSomebodyElse):
    shelf = None

    def backend(self, form):
        cls = type(self)
        cls.shelf = cls.shelf or SwappedPages(form, 1 << 30)
        return cls.shelf


def verified(
    suite: HitEqualsRecompute, ways: tuple[Way, ...], lengths: tuple[int, ...] = (150, 81)
) -> VerifyReport:
    type(suite).ways = ways
    type(suite).lengths = lengths
    return suite.verified()


def differing(report: VerifyReport) -> set[Way]:
    return {found.way for found in report.results if isinstance(found.verdict, Differs)}


def test_a_store_that_swaps_two_pages_is_caught_wherever_it_is_read():
    report = verified(BadStore(), (Way.COMPUTED, Way.HOST, *STORED))
    assert differing(report) == set(STORED)
    assert not report.exact


def test_a_store_that_ends_with_its_engine_is_seen():
    class Forgetful(Ours):
        storage = "memory://?quota=64MiB"

    assert differing(verified(Forgetful(), STORED)) == {Way.RESTART}


@pytest.mark.parametrize("copier", [LastPageForgotten(), LastPageTwice()])
def test_a_transfer_engine_that_copies_one_page_wrongly_is_caught(copier):
    class Bad(TestATransferEngineOfSomebodyElse):
        pass

    Bad.copier = copier
    report = verified(Bad(), (Way.COMPUTED, Way.DEVICE, Way.HOST, Way.STORAGE))
    assert differing(report) == {Way.HOST}
    assert report[Way.STORAGE].verdict == NotRun("there is no storage")


class Drifting:
    """A model whose answer is a little another where a last chunk does not begin at a multiple of
    ``chunk``: off by 1e-4."""

    def __init__(self, inner: Runner, chunk: int) -> None:
        self._inner = inner
        self._chunk = chunk

    def forward(self, batch):
        found = self._inner.forward(batch)
        logits = found.logits
        late = (batch.counts > 1) & (batch.starts % self._chunk != 0)
        off = torch.from_numpy(np.where(late[batch.sampled], 1e-4, 0.0)).to(logits)
        logits = logits + off[:, None] * logits.abs().amax(dim=1, keepdim=True)
        return replace(found, logits=logits)


def test_a_model_whose_cached_path_differs_is_caught(monkeypatch):
    drifting = replace(
        devices.CPU, runner=lambda *what: Drifting(devices.runner_of(*what), chunk=40)
    )
    monkeypatch.setattr(devices, "CPU", drifting)
    report = verified(Ours(), (Way.COMPUTED, Way.DEVICE, Way.HOST))
    assert differing(report) == {Way.DEVICE, Way.HOST}
    verdict = report[Way.DEVICE].verdict
    assert isinstance(verdict, Differs)
    assert (verdict.prompt, verdict.token) == (0, 0)
    assert 1e-5 < verdict.error < 1e-3
    assert isinstance(report[Way.COMPUTED].verdict, Exact)


def test_a_model_that_shows_where_it_was_cut_is_caught(monkeypatch):
    drifting = replace(
        devices.CPU, runner=lambda *what: Drifting(devices.runner_of(*what), chunk=40)
    )
    monkeypatch.setattr(devices, "CPU", drifting)
    report = verified(Ours(), (Way.COMPUTED, Way.CUT), (81,))
    assert differing(report) == {Way.CUT}
    verdict = report[Way.CUT].verdict
    assert isinstance(verdict, Differs)
    assert verdict.prompt > 0, "one token at a time it is right"


def test_a_prompt_that_no_chunk_cuts_is_reported_as_none():
    suite = HitEqualsRecompute()
    model = suite.model()
    settings = Settings(bound=1.0, salt="x", cuts=(40, 41))
    report = Verifier(suite.start(model), prompts(512, (40,)), settings).run((Way.CUT,))
    assert report[Way.CUT].verdict == NotRun("no chunk is smaller than a prompt")


def test_chunks_lie_on_either_side_of_pages_windows_and_scans():
    windows = spec_of(model_of("gemma3").config.to_dict(), page_tokens=16, dtype="float32")
    assert cut_sizes(windows, {}, 150) == (1, 2, 15, 16, 17, 39, 40, 41)
    assert cut_sizes(windows, {}, 40) == (1, 2, 15, 16, 17)
    chunks = spec_of(model_of("llama4").config.to_dict(), page_tokens=16, dtype="float32")
    assert cut_sizes(chunks, {}, 150) == (1, 2, 15, 16, 17, 55, 56, 57)
    states = spec_of(model_of("mamba2").config.to_dict(), page_tokens=1, dtype="float32")
    assert cut_sizes(states, {"chunk_size": 16}, 150) == (1, 2, 15, 16, 17, 63, 64, 65)


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
        return VerifyOutput(tuple(range(count)), torch.ones(count, model.vocab_size), 0.0)

    settings = Settings(bound=1.0, salt="x")
    verifier = Verifier(suite.start(model), prompts(model.vocab_size, (40,)), settings, liar)
    assert not verifier.run((Way.COMPUTED,)).exact
    assert asked == [40]

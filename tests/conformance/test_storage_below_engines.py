"""The public storage suite through the adapters of vLLM and SGLang, without these engines: what a
store promises still holds after the way through an engine's verbs."""

import pytest

from stratakv.connect.namespace_records import load_records
from stratakv.storage.backend import ReadStatus, StorageBackend, StoreFormat, WriteStatus
from stratakv.testing.storage_conformance import (
    FORM,
    StorageConformance,
    StorageSubject,
    fetch,
    keys_of,
    store,
)
from tests.below_engines import BelowSglang, BelowVllm, OpenedStores
from tests.fixtures import fake_sglang, fake_vllm
from tests.storage_files import flip_payload
from tests.unit.test_connect_vllm import Manager, checkpoint

pytestmark = pytest.mark.usefixtures("no_toolkit")


class Adapted(StorageConformance):
    """A subclass has ``through``: an adapter over a URL, of a form."""

    @pytest.fixture
    def opened(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return OpenedStores(monkeypatch)

    @pytest.fixture
    def model(self, tmp_path):
        return checkpoint(tmp_path / "model")

    @pytest.fixture
    def subject(self, through, tmp_path):
        place = tmp_path / "store"
        last = []

        def opening(form: StoreFormat) -> StorageBackend:
            last[:] = [through(f"file://{place}?quota=64MiB", form)]
            return last[0]

        def corrupt(key):
            _, name = last[0].place(key)
            flip_payload(place, name, 100)

        return StorageSubject(
            open=opening,
            corrupt=corrupt,
            shared=True,
            lasting=True,
            small=lambda: through(f"file://{tmp_path}/small?quota={12 * 7 * 4096}B", FORM),
        )

    def test_closing_twice_is_closing_once_and_then_nothing_works(self, subject, quiet):
        """No error of a store's reaches an engine: what does not work is a miss."""
        backend = subject.open(FORM)
        keys = keys_of("closed", 1)
        store(backend, keys)
        backend.close()
        backend.close()
        assert not backend.contains(keys).any()
        assert fetch(backend, keys) == [ReadStatus.FAILED]
        assert store(backend, keys) == [WriteStatus.FAILED]


class TestBelowVllm(Adapted):
    @pytest.fixture
    def through(self, monkeypatch, model, opened):
        adapter = fake_vllm.install(monkeypatch)

        def manager_of(*given, **changes):
            return Manager(adapter, *given, **changes)

        return lambda storage, form: BelowVllm(manager_of, model, storage, form, opened)

    def test_closing_twice_is_closing_once_and_then_nothing_works(self, subject):
        """vLLM shuts a tier down and drops it: it lets go of rows, and answers nobody."""
        backend = subject.open(FORM)
        keys = keys_of("closed", 2)
        store(backend, keys)
        backend.close()
        assert backend.manager.tier.totals["stored"] == 2
        assert len(load_records("vllm")) == 1


@pytest.mark.parametrize(
    "calls", ["v1", "v2", pytest.param("page by page", marks=pytest.mark.long)]
)
class TestBelowSglang(Adapted):
    @pytest.fixture
    def through(self, monkeypatch, model, opened, calls):
        def make(settings, **server):
            adapter = fake_sglang.install(monkeypatch, fake_sglang.arguments(model, **server))
            return adapter.StrataStorage(settings, {})

        return lambda storage, form: BelowSglang(make, storage, form, opened, calls)

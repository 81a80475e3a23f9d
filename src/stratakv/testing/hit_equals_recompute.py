"""The suite for what an engine is made of, a store, a transfer engine or a model: whatever way a
prefix came, tokens and logits are those of a run without a cache, and exactly what could be
reused was. Owns what a suite says of itself; the engine it is tried in is
``hit_engine``'s, which is loaded when a suite runs, and the ways are ``engine.verify``'s.

    class TestMyStore(HitEqualsRecompute):
        def backend(self, form):
            return MyBackend(form)

    class TestAStoreThatIsThere(HitEqualsRecompute):
        storage = "redis://localhost"

    class TestMyTransferEngine(HitEqualsRecompute):
        def transfer(self, spec, pools, arenas):
            return MyEngine(spec, pools, arenas)

    class TestMyDevice(HitEqualsRecompute):
        def device(self):
            return Device(pools=MyPools, transfer=MyEngine, kernels=my_kernels)

    class TestMyModel(HitEqualsRecompute):
        directory = Path("path/to/model")

Needs the extras ``serve`` and ``testing`` (pytest). Pages that nobody owns are NaN throughout.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from stratakv.core.ids import TokenIds
from stratakv.engine.verify.report import Differs, NotRun, VerifyReport, Way
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.spec.groups import CacheSpec
from stratakv.storage.backend import StorageBackend, StoreFormat
from stratakv.transfer.cpu import CpuTransferEngine
from stratakv.transfer.engine import TransferEngine

if TYPE_CHECKING:
    from stratakv.assembly.device import Device
    from stratakv.engine.huggingface.model import HuggingFaceModel
    from stratakv.engine.verify.claims import StartSubject


def prompts(vocab: int, lengths: Sequence[int]) -> list[TokenIds]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, vocab, tokens).astype(np.int32) for tokens in lengths]


class HitEqualsRecompute:
    """Subclass as ``Test...`` and name what is yours; what is not named is ours."""

    directory: ClassVar[Path | None] = None
    """A model's; None: ``tiny_model``. In float32, whatever it was saved in."""
    bound: ClassVar[float] = 1e-5
    """Of two logits that are equal, in parts of the largest one; of your model's family."""
    lengths: ClassVar[tuple[int, ...]] = (150, 81, 40)
    """Tokens of each prompt: several windows, several pages, and a part of one."""
    ways: ClassVar[tuple[Way, ...]] = tuple(Way)
    """What has to run: all, where there is a store."""
    storage: ClassVar[str | None] = None
    """URL of a store, as ``--storage`` takes it; pages under a name of their own stay in it. It
    has to outlast the engine that it is attached to: ``memory://`` does not."""

    def model(self) -> "HuggingFaceModel":
        from stratakv.testing import hit_engine  # noqa: PLC0415 - the engine is an extra

        return hit_engine.model_of(self.directory)

    def backend(self, form: StoreFormat) -> StorageBackend | None:
        """The store, where ``storage`` names none; opened again over the same place after a
        restart. None: none."""
        del form
        return None

    def transfer(
        self, spec: CacheSpec, pools: DevicePools, arenas: Sequence[HostArena]
    ) -> TransferEngine:
        return CpuTransferEngine(spec, pools, arenas)

    def device(self) -> "Device[Any]":
        """What the engine is made of: the CPU's, with ``transfer``."""
        from stratakv.assembly import device as devices  # noqa: PLC0415 - as above

        return replace(devices.CPU, transfer=self.transfer)

    def start(self, model: "HuggingFaceModel") -> "StartSubject":
        """What starts an engine over ``model``."""
        from stratakv.testing import hit_engine  # noqa: PLC0415 - as above

        return hit_engine.start(self, model)

    def verified(self) -> VerifyReport:
        from stratakv.testing import hit_engine  # noqa: PLC0415 - as above

        model = self.model()
        asked = prompts(model.vocab_size, self.lengths)
        return hit_engine.verified(self, model, asked)

    @pytest.fixture(scope="class")
    @classmethod
    def report(cls) -> VerifyReport:
        return cls().verified()

    @pytest.mark.parametrize("way", Way)
    def test_a_hit_gives_what_a_recomputation_gives(self, report: VerifyReport, way: Way) -> None:
        if way not in self.ways:
            pytest.skip("not asked for")
        verdict = report[way].verdict
        if isinstance(verdict, NotRun):
            pytest.skip(verdict.why)
        assert not isinstance(verdict, Differs), f"{way.value}: {verdict}"

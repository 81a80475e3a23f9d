"""The public storage suite on the file store, with and without batched fdatasync."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stratakv.core.clock import WallClock
from stratakv.storage.backend import ObjectKey, StorageBackend, StoreFormat
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.store import FileStore
from stratakv.testing.storage_conformance import FORM, StorageConformance, StorageSubject
from tests.storage_files import flip_payload


def opener(directory: Path, limits: StoreLimits) -> Callable[[StoreFormat], StorageBackend]:
    return lambda form: FileStore(directory, form, limits, WallClock())


class TestFileStore(StorageConformance):
    @pytest.fixture(params=[False, True], ids=["process", "power"])
    def subject(self, tmp_path: Path, request: pytest.FixtureRequest) -> StorageSubject:
        place = tmp_path / "store"
        limits = StoreLimits(quota_bytes=64 << 20, power_safe=request.param)
        open_small = opener(tmp_path / "small", StoreLimits(quota_bytes=12 * 7 * 4096))

        def corrupt(key: ObjectKey) -> None:
            flip_payload(place, key, 100 if key.group < 2 else 0)

        return StorageSubject(
            open=opener(place, limits),
            corrupt=corrupt,
            shared=True,
            lasting=True,
            small=lambda: open_small(FORM),
        )

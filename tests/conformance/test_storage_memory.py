"""The public storage suite on the in-memory backend."""

import pytest

from stratakv.storage.backend import ObjectKey, StorageBackend, StoreFormat
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.storage_conformance import FORM, StorageConformance, StorageSubject


class TestMemoryBackend(StorageConformance):
    @pytest.fixture
    def subject(self) -> StorageSubject:
        opened: list[MemoryBackend] = []

        def open_it(form: StoreFormat) -> StorageBackend:
            opened.append(MemoryBackend(form))
            return opened[-1]

        def corrupt(key: ObjectKey) -> None:
            opened[-1].damage(key, 17)

        return StorageSubject(
            open=open_it,
            corrupt=corrupt,
            shared=False,
            lasting=False,
            small=lambda: MemoryBackend(FORM, quota_bytes=8 * FORM.page_bytes[0] + 1),
        )

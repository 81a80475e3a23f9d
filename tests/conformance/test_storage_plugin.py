"""A backend of somebody else: an installed package with an entry point, and the public suite on it.

The package and its test know nothing of this repository but what is published.
"""

import subprocess
import sys
from pathlib import Path

import pytest

BACKEND = """
import zlib

import numpy as np

from stratakv.core.errors import StorageError
from stratakv.storage.backend import Everything, ReadStatus, WriteStatus

SHELVES = {}


class Shelf:
    def __init__(self, url, form):
        place = SHELVES.setdefault(url.url, {})
        self.pages = place.setdefault(form.spec_digest, {})

    def shelf(self):
        if self.pages is None:
            raise StorageError("acme: closed")
        return self.pages

    def contains(self, keys):
        pages = self.shelf()
        return np.array([key in pages for key in keys], bool)

    def read(self, keys, into):
        return [self.one(key, place) for key, place in zip(keys, into)]

    def one(self, key, place):
        found = self.shelf().get(key)
        if found is None:
            return ReadStatus.MISS
        data, check = found
        if zlib.crc32(data) != check:
            del self.pages[key]
            return ReadStatus.CORRUPT
        place[:] = data
        return ReadStatus.HIT

    def write(self, keys, pages):
        held, statuses = self.shelf(), []
        for key, page in zip(keys, pages):
            statuses.append(WriteStatus.PRESENT if key in held else WriteStatus.STORED)
            held.setdefault(key, (bytearray(page), zlib.crc32(page)))
        return statuses

    def touch(self, keys):
        pass

    def remove(self, keys):
        held = self.shelf()
        gone = list(held) if isinstance(keys, Everything) else keys
        return sum(held.pop(key, None) is not None for key in gone)

    def close(self):
        self.pages = None
"""

SUITE = """
import acme_kv
import pytest

from stratakv.storage.registry import open_storage, plugin_schemes
from stratakv.storage.urls import parse_storage_url
from stratakv.testing.storage_conformance import FORM, StorageConformance, StorageSubject


class TestShelf(StorageConformance):
    @pytest.fixture
    def subject(self, tmp_path):
        url = parse_storage_url(f"acme://{tmp_path}", plugin_schemes())

        def corrupt(key):
            acme_kv.SHELVES[url.url][FORM.spec_digest][key][0][-1] ^= 1

        return StorageSubject(
            open=lambda form: open_storage(url, form),
            corrupt=corrupt,
            shared=True,
            lasting=True,
            small=None,
        )
"""

BUGS = {
    "serves what is corrupt": ("if zlib.crc32(data) != check", "if False"),
    "everything is every format's": (
        "held = self.shelf()\n",
        "held = self.shelf()\n        [p.clear() for s in SHELVES.values() for p in s.values()]\n",
    ),
}


def install(place: Path, backend: str) -> None:
    """Under ``place / "site"``, which is to be on the path."""
    metadata = place / "site" / "acme_kv-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kv\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[stratakv.storage]\nacme = acme_kv:Shelf\n")
    (place / "site" / "acme_kv.py").write_text(backend)


def suite_on(place: Path, backend: str) -> subprocess.CompletedProcess[str]:
    """As the other project would: its package on the path, its test, nothing of ours but that."""
    install(place, backend)
    (place / "test_acme.py").write_text(SUITE)
    start = "import sys; sys.path.insert(0, 'site'); import pytest; sys.exit(pytest.main())"
    return subprocess.run(
        [sys.executable, "-c", start, "-q", "-p", "no:cacheprovider", "-x", "test_acme.py"],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_third_partys_backend_passes_the_public_suite(tmp_path):
    done = suite_on(tmp_path, BACKEND)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) >= 18


@pytest.mark.parametrize("bug", BUGS)
def test_a_third_partys_bug_is_caught(tmp_path, bug):
    right, wrong = BUGS[bug]
    assert BACKEND.count(right) >= 1
    done = suite_on(tmp_path, BACKEND.replace(right, wrong))
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-1000:]

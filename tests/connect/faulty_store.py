"""A file store that misbehaves on purpose, under a scheme that a package brings:
``faulty:///DIRECTORY?NAME=VALUE``, with the names of ``Faults``.

Owns the scheme. Runs in an engine's environment.
"""

from urllib.parse import parse_qsl, urlsplit

from stratakv.storage.registry import open_storage
from stratakv.storage.urls import parse_storage_url
from stratakv.testing.storage_faults import Faults, FaultyBackend


def open_store(url, form):
    where = urlsplit(url.url)
    faults = {name: float(value) for name, value in parse_qsl(where.query)}
    below = open_storage(parse_storage_url(f"file://{where.path}?quota=64MiB"), form)
    return FaultyBackend(below, Faults(**faults))

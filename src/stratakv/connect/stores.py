"""From a storage URL to an open store of another engine's pages.

Owns the checks of what the operator has given. Opening blocks: now, or in the first call.
"""

from collections.abc import Sequence

from stratakv.connect.namespace import EngineNamespace
from stratakv.core.errors import ConfigError, StorageError
from stratakv.storage.backend import StoreFormat
from stratakv.storage.ends import ends_on_use, open_ends
from stratakv.storage.io_worker import Backends
from stratakv.storage.registry import plugin_schemes
from stratakv.storage.store_key import read_key
from stratakv.storage.urls import hidden, parse_storage_url


def format_of(namespace: EngineNamespace, page_bytes: Sequence[int]) -> StoreFormat:
    """``page_bytes``: of one page, by group."""
    return StoreFormat(spec_digest=namespace.spec_digest, page_bytes=tuple(page_bytes))


def open_engine_store(url: str, key_file: str | None, form: StoreFormat) -> Backends:
    """The store of ``url``, sealed where there is a ``key_file``; ConfigError where it is not
    allowed, or does not answer: at a start that is the operator's business."""
    key = None if key_file is None else read_key(key_file)
    parsed = parse_storage_url(url, plugin_schemes())
    try:
        return open_ends(parsed, form, key, url)
    except StorageError as error:
        raise ConfigError(f"--storage {hidden(url)}: {error}") from error


def store_on_use(url: str, key_file: str | None, form: StoreFormat) -> Backends:
    """The same, opened by whoever calls it first: bound and left alone as any call of it is.
    ConfigError for what is not allowed."""
    key = None if key_file is None else read_key(key_file)
    return ends_on_use(parse_storage_url(url, plugin_schemes()), form, key, url)

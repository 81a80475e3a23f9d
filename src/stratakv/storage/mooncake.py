"""Pages in a Mooncake Store, one object each, from and into the caller's memory without a copy.

Owns one client of the store, with the memory that it registered. The master answers who has what;
what is evicted is its choice. Must not have threads or keep an index.
"""

import os
import re
import socket
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.errors import StorageError
from stratakv.storage.backend import Everything, ObjectKey, ReadStatus, StoreFormat, WriteStatus
from stratakv.storage.header import HEADER_BYTES, payload_hash
from stratakv.storage.remote_object import (
    are_genuine,
    batches,
    blank_heads,
    first_places,
    head_views,
    library_missing,
    name_of,
    seal_head,
    unsealed_heads,
)
from stratakv.storage.urls import MooncakeOptions

# The codes of the store's client that mean something to us; all others are a failure of one object.
_NO_ROOM: Final = -200
_WRONG_SIZE: Final = -600
_NO_OBJECT: Final = -704
_PRESENT: Final = -705
_TRANSFER: Final = -800
_RPC: Final = -900
"""And below: the master was not asked, or did not answer in time."""

_WRITTEN: Final = {
    0: WriteStatus.STORED,
    _PRESENT: WriteStatus.PRESENT,
    _NO_ROOM: WriteStatus.REFUSED,
}

Client: TypeAlias = Any
"""``MooncakeDistributedStore``; the wheel has no types."""
_OBJECTS: Final = 256
"""In one batch; their headers lie in one registered table."""
_REGIONS: Final = 64
"""Registered at once. A host arena is one; a caller with more buffers than that pays for it."""


class MooncakeBackend:
    """A ``StorageBackend``. ConfigError where the client is missing; StorageError where no master
    answers. ``connect``: what makes the client."""

    def __init__(
        self,
        form: StoreFormat,
        options: MooncakeOptions,
        connect: Callable[[MooncakeOptions], Client] | None = None,
    ) -> None:
        self._form, self._options = form, options
        self._client: Client | None = (connect or connected)(options)
        self._regions: OrderedDict[int, npt.NDArray[Any]] = OrderedDict()
        self._heads = blank_heads(_OBJECTS)
        self._head_views = head_views(self._heads)

    def contains(self, keys: Sequence[ObjectKey]) -> npt.NDArray[np.bool_]:
        codes = np.array(self._open().batch_is_exist(self._names(keys)), np.int64)
        if (codes < 0).any():
            raise _failed("exist", codes.min())
        return codes == 1

    def read(self, keys: Sequence[ObjectKey], into: Sequence[memoryview]) -> list[ReadStatus]:
        client = self._open()
        first = first_places(keys)
        if len(first) < len(keys):
            return self._read_doubled(keys, into, first)
        statuses: list[ReadStatus] = []
        for at in self._batches(into):
            statuses += self._read_batch(client, keys[at], into[at])
            self._let_go(client)
        corrupt = [i for i, status in enumerate(statuses) if status is ReadStatus.CORRUPT]
        if corrupt:
            # Put aside: a store of immutable objects would ignore a new one under its name.
            self.remove([keys[i] for i in corrupt])
        return statuses

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[memoryview]) -> list[WriteStatus]:
        client = self._open()
        statuses = [WriteStatus.PRESENT] * len(keys)
        # The client says of an object that is there already that it was stored.
        absent = np.flatnonzero(~self.contains(keys)).tolist()
        firsts = first_places([keys[i] for i in absent]).values()
        fresh = [absent[at] for at in firsts]
        for at in self._batches([pages[i] for i in fresh]):
            some = fresh[at]
            done = self._write_batch(client, [keys[i] for i in some], [pages[i] for i in some])
            for i, status in zip(some, done, strict=True):
                statuses[i] = status
            self._let_go(client)
        return statuses

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        # To the master a question is a use: it renews the lease that eviction goes by.
        with suppress(StorageError):
            self.contains(keys)

    def remove(self, keys: Sequence[ObjectKey] | Everything) -> int:
        if isinstance(keys, Everything):
            return self._remove_all()
        # By force: a question a moment ago holds a lease. Who reads just now sees the checksum.
        codes = self._open().batch_remove(self._names(keys), True)  # noqa: FBT003 - their API
        _check(codes, "remove")
        return sum(code == 0 for code in codes)

    def _remove_all(self) -> int:
        place = f"{self._options.prefix}/{self._form.spec_digest.hex()}/"
        # Their grammar is ECMAScript's, which knows fewer escapes than Python's.
        literal = re.sub(r"[][^$\\.*+?(){}|]", r"\\\g<0>", place)
        removed = self._open().remove_by_regex(f"^{literal}.*", True)  # noqa: FBT003 - their API
        if removed < 0:
            raise _failed("remove_by_regex", removed)
        return removed

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            for address in self._regions:
                client.unregister_buffer(address)
            self._regions.clear()
            client.close()

    def _open(self) -> Client:
        if self._client is None:
            raise StorageError("mooncake: the store is closed")
        return self._client

    def _names(self, keys: Sequence[ObjectKey]) -> list[str]:
        return [f"{self._options.prefix}/{name_of(key, self._form)}" for key in keys]

    def _batches(self, pages: Sequence[memoryview]) -> Iterator[slice]:
        floor = self._options.batch_bytes // _OBJECTS
        return batches([max(floor, len(page)) for page in pages], self._options.batch_bytes)

    def _read_doubled(
        self, keys: Sequence[ObjectKey], into: Sequence[memoryview], first: dict[ObjectKey, int]
    ) -> list[ReadStatus]:
        """The client fills only one buffer for a key, though it says that it filled all."""
        found = dict(
            zip(first, self.read(list(first), [into[i] for i in first.values()]), strict=True)
        )
        for i, key in enumerate(keys):
            if i != first[key]:
                into[i][:] = into[first[key]]
        return [found[key] for key in keys]

    def _read_batch(
        self, client: Client, keys: Sequence[ObjectKey], into: Sequence[memoryview]
    ) -> list[ReadStatus]:
        names = self._names(keys)
        self._heads[: len(keys)] = 0
        codes = client.batch_get_into_multi_buffers(names, *self._places(client, into))
        _check(codes, "get")
        whole = [code == HEADER_BYTES + len(page) for code, page in zip(codes, into, strict=True)]
        hashes = [payload_hash(page) if ok else 0 for ok, page in zip(whole, into, strict=True)]
        genuine = are_genuine(keys, self._form, self._heads[: len(keys)], hashes).tolist()
        statuses: list[ReadStatus] = []
        for i, code in enumerate(codes):
            if whole[i]:
                statuses.append(ReadStatus.HIT if genuine[i] else ReadStatus.CORRUPT)
            else:
                statuses.append(_not_read(client, names[i], code, HEADER_BYTES + len(into[i])))
        return statuses

    def _write_batch(
        self, client: Client, keys: Sequence[ObjectKey], pages: Sequence[memoryview]
    ) -> list[WriteStatus]:
        self._heads[: len(keys)] = unsealed_heads(keys, self._form)
        for head, page in zip(self._head_views, pages, strict=False):
            seal_head(head, page)
        codes = client.batch_put_from_multi_buffers(self._names(keys), *self._places(client, pages))
        _check(codes, "put")
        return [_WRITTEN.get(code, WriteStatus.FAILED) for code in codes]

    def _places(
        self, client: Client, pages: Sequence[memoryview]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The addresses and the sizes of each object's two parts, all of it registered."""
        start = self._register(client, self._head_views[0])
        at = [[start + i * HEADER_BYTES, self._register(client, p)] for i, p in enumerate(pages)]
        return at, [[HEADER_BYTES, len(page)] for page in pages]

    def _register(self, client: Client, page: memoryview) -> int:
        """The address of ``page``, whose whole underlying buffer is registered from now on, and
        kept alive, so that no other memory can get its address meanwhile."""
        begin, size, owner = region_of(page)
        known = self._regions.get(begin)
        if known is not None and known.nbytes < size:
            client.unregister_buffer(begin)
            known = None
        if known is None:
            # An error says that it overlaps with what is registered, which is as good.
            client.register_buffer(begin, size)
            self._regions[begin] = owner
        self._regions.move_to_end(begin)
        return np.frombuffer(page, np.uint8).ctypes.data

    def _let_go(self, client: Client) -> None:
        """Between batches: of the regions that were used longest ago, if there are too many."""
        while len(self._regions) > _REGIONS:
            client.unregister_buffer(self._regions.popitem(last=False)[0])


def region_of(page: memoryview) -> tuple[int, int, npt.NDArray[Any]]:
    """Address and size of the array that ``page`` is a part of, and that array."""
    array = np.frombuffer(page, np.uint8)
    found = page.obj
    while isinstance(found, np.ndarray) and isinstance(found.base, np.ndarray):
        found = found.base
    if isinstance(found, np.ndarray) and found.flags.c_contiguous:
        array = found
    return array.ctypes.data, array.nbytes, array


def connected(options: MooncakeOptions) -> Client:
    try:
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - only who uses it
    except ImportError as error:
        raise library_missing("mooncake", error, "libibverbs1 libcurl4 libnuma1") from error
    host, port = options.master
    try:
        # The client itself waits a minute and a half for a master that is not there.
        with socket.create_connection(options.master, options.connect_timeout_s) as probe:
            ours = options.host or probe.getsockname()[0]
    except OSError as error:
        raise StorageError(f"mooncake: no master at {host}:{port}: {error}") from error
    with _limits(options):
        client = MooncakeDistributedStore()
        code = client.setup(
            ours,
            options.metadata,
            options.segment_bytes,
            options.buffer_bytes,
            options.transport,
            options.devices,
            f"{host}:{port}",
        )
    if code != 0:
        raise _failed("setup", code)
    return client


@contextmanager
def _limits(options: MooncakeOptions) -> Generator[None]:
    """A client that is made meanwhile has our limits: it takes them from the environment only,
    where the operator's own go first."""
    limits = {
        "MC_RPC_TIMEOUT_MS": options.timeout_s,
        "MC_RPC_CONNECT_TIMEOUT_MS": options.connect_timeout_s,
    }
    ours = {name: str(max(1, round(s * 1000))) for name, s in limits.items()}
    ours = {name: value for name, value in ours.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def _not_read(client: Client, name: str, code: int, size: int) -> ReadStatus:
    """Why object ``name`` of ``size`` bytes did not come whole."""
    if code == _NO_OBJECT:
        return ReadStatus.MISS
    if code >= 0 or code in {_WRONG_SIZE, _TRANSFER}:
        # Asked for more bytes than there are, the client calls it a failed transfer.
        stored = client.get_size(name)
        if stored >= 0 and stored != size:
            return ReadStatus.CORRUPT
    return ReadStatus.FAILED


def _check(codes: Sequence[int], what: str) -> None:
    worst = min(codes, default=0)
    if worst <= _RPC:
        raise _failed(what, worst)


def _failed(what: str, code: int) -> StorageError:
    return StorageError(f"mooncake: {what} failed with code {code}")

"""Cache groups and their sidecar buffers: everything the cache knows about a model.

Owns the vocabulary of a spec and its digest. Must not read a model config (``derive``), nor hold
bytes (``memory``).
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import Enum
from math import prod
from typing import Final

from stratakv.core.ids import GroupId, LayerId
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepLive, Retention

DTYPE_BYTES: Final[dict[str, int]] = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1, "int8": 1,
}  # fmt: skip

ANCHOR: Final = GroupId(0)

HOST_ALIGNMENT_BYTES: Final = 64
"""A host page starts at a multiple of this, a cache line and any vector load; what it does not fill
is padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSpec:
    """One sidecar: ``rows_per_page`` rows per page and layer, addressed by its group's page ids.

    A row has ``row_shape`` elements of ``dtype``: [kv_heads, head_dim] for a key, [channels, width]
    for a convolution state. Layers of one buffer are alike; a layer that differs is another buffer.
    """

    name: str
    layers: tuple[LayerId, ...]
    rows_per_page: int
    row_shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"buffer {self.name}: dtype {self.dtype}, not {sorted(DTYPE_BYTES)}")
        if self.rows_per_page < 1 or min(self.row_shape, default=0) < 1 or not self.layers:
            raise ValueError(f"buffer {self.name} would hold no bytes")
        if len(set(self.layers)) != len(self.layers):
            raise ValueError(f"buffer {self.name} names a layer twice")

    @property
    def row_bytes(self) -> int:
        return prod(self.row_shape) * DTYPE_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return self.rows_per_page * self.row_bytes

    @property
    def page_bytes(self) -> int:
        return len(self.layers) * self.layer_bytes


class Home(Enum):
    """Where a running request may leave a group's full pages, and read rows of them."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """One retention rule, one logical page space per tier, any number of sidecars (also none).
    ``home``: of one at home on the host attention reads but a few selected rows, so that its pages
    need not be on the device."""

    id: GroupId
    name: str
    retention: Retention
    buffers: tuple[BufferSpec, ...]
    home: Home = Home.DEVICE

    def __post_init__(self) -> None:
        if self.home is Home.HOST and not (self.id and self.buffers and self.keeps_all):
            raise ValueError(f"group {self.name} cannot have its home on the host")
        names = [buffer.name for buffer in self.buffers]
        if len(set(names)) != len(names):
            raise ValueError(f"group {self.name} names a buffer twice: {names}")

    @property
    def page_bytes(self) -> int:
        return sum(buffer.page_bytes for buffer in self.buffers)

    @property
    def host_stride_bytes(self) -> int:
        """Bytes from one host page to the next; 0 for a group without buffers."""
        return -(-self.page_bytes // HOST_ALIGNMENT_BYTES) * HOST_ALIGNMENT_BYTES

    @property
    def keeps_all(self) -> bool:
        """Whether a page is worth as much as the prefix it is part of, for as long."""
        return isinstance(self.retention, KeepAll)

    @property
    def stateful(self) -> bool:
        """Whether a running request carries one live page that changes with every token, instead
        of a row per token."""
        return isinstance(self.retention, KeepBoundary | KeepLive)

    @property
    def scratch(self) -> bool:
        """Whether every page of it is a request's own and goes with it: none is ever cached."""
        return isinstance(self.retention, KeepLive)

    @property
    def at_home_on_host(self) -> bool:
        return self.home is Home.HOST

    @property
    def page_rows(self) -> int:
        """Rows of one page; AssertionError where buffers differ in that."""
        (rows,) = {buffer.rows_per_page for buffer in self.buffers}
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """A model's cache: ``groups[0]`` is the anchor, whose presence makes a prefix exist."""

    page_tokens: int
    groups: tuple[CacheGroup, ...]

    def __post_init__(self) -> None:
        if self.page_tokens < 1:
            raise ValueError(f"page_tokens must be at least 1, got {self.page_tokens}")
        if not self.groups or not isinstance(self.groups[0].retention, KeepAll):
            raise ValueError("group 0, the anchor, must keep every page")
        if [group.id for group in self.groups] != list(range(len(self.groups))):
            raise ValueError("group ids must be 0, 1, 2, ... in order")

    @property
    def has_home_on_host(self) -> bool:
        """Whether some group's pages are read on the host."""
        return any(group.at_home_on_host for group in self.groups)

    @property
    def digest(self) -> bytes:
        """16 bytes that differ whenever two caches could not read each other's pages."""
        fields = asdict(self)
        for group, plain in zip(self.groups, fields["groups"], strict=True):
            plain["retention"] = repr(group.retention)
            del plain["home"]  # pages have the same bytes wherever they are
        text = json.dumps(fields, sort_keys=True)
        return hashlib.sha256(text.encode()).digest()[:16]

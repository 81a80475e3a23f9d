"""Where a decoding step reads the entries that it has selected of spilled requests: the protocol of
who plans that, on the device or beside it, and the CPU's way.

A request's entries are looked up in three places: its own device pages, its buffer, and, for what
is missing, the host, from where it is copied into the buffer first. Rows come in the order in which
they were selected, wherever they are. Owns the buffers' tables; must not choose what is selected.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch

from stratakv.core.ids import LayerId
from stratakv.engine.attention.step_meta import Ints
from stratakv.memory.block_table import SpilledPages
from stratakv.sparse.hot_buffer import HotBuffers, HotBufferShape
from stratakv.sparse.reads import EntryPlaces
from stratakv.transfer.copy_plan import PageRows
from stratakv.transfer.host_rows import HostRows


class Missing(Protocol):
    """What must be copied before a selection is read; alike in all layers that share it."""

    def load(self, layer: LayerId) -> None:
        """Copy it, or queue that before whatever is launched next."""
        ...


class SpilledBucket(Protocol):
    """Decoding requests b of a step, some of them spilled."""

    def read(
        self,
        plan: int,
        found: torch.Tensor,
        entries: torch.Tensor | None,
        hidden: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Missing]:
        """Where the requests read their ``entries`` int64 [b, k], all from the first on where that
        is None, of selection ``plan`` of the step. ``found`` int64 [b, k] are the rows by table,
        right for what is on the device; ``hidden`` bool [b, k]: what is nobody's entry. Returns the
        rows, int64 [b, k]; once per plan and step."""
        ...


class SwapIns(Protocol):
    """The buffers of one group's spilled requests, for each selection of a step."""

    def begin(self, rows: Ints) -> None:
        """A step with the spilled requests at ``rows``: their pages are what they are now."""
        ...

    def clear(self, row: int) -> None:
        """Nothing of a request is in its buffer."""
        ...

    def bucket(self, rows: Ints, at: Ints) -> SpilledBucket:
        """Of the decoding requests ``rows`` [b] those at ``at`` are spilled."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SwapShape:
    """``places``: of all requests. An entry is one of a page's ``page_rows`` rows; a step selects
    ``top_k`` of them at most, ``plans`` times."""

    places: SpilledPages
    page_rows: int
    top_k: int
    plans: int

    @property
    def buffer(self) -> HotBufferShape:
        entries = self.places.buffer.shape[1] * self.page_rows
        return HotBufferShape(entries=entries, page_rows=self.page_rows, top_k=self.top_k)

    @property
    def most_entries(self) -> int:
        return self.places.host.shape[1] * self.page_rows


MakeSwapIns: TypeAlias = Callable[[HostRows, SwapShape], SwapIns]
CopyEntries: TypeAlias = Callable[[LayerId, PageRows, PageRows], None]
"""From rows of host pages, the last, to rows of device pages, in one layer."""


class HostSwapIns:
    """``SwapIns`` planned by the CPU. ``copy`` moves what is missing."""

    def __init__(self, copy: CopyEntries, shape: SwapShape) -> None:
        self._copy, self._shape = copy, shape
        self._buffers = HotBuffers(
            shape.buffer, shape.plans, len(shape.places.host), shape.most_entries
        )

    @classmethod
    def of(cls, host: HostRows, shape: SwapShape) -> "HostSwapIns":
        return cls(host.load, shape)

    @classmethod
    def of_pages(cls, host: HostRows, shape: SwapShape) -> "HostSwapIns":
        """Of entries that are whole pages."""
        assert shape.page_rows == 1, f"an entry of {shape.page_rows} to a page"

        def copy(layer: LayerId, device: PageRows, away: PageRows) -> None:
            host.load_pages(layer, device.pages, away.pages)

        return cls(copy, shape)

    def begin(self, rows: Ints) -> None:
        pass  # places are looked at when entries are read

    def clear(self, row: int) -> None:
        self._buffers.clear(row)

    def bucket(self, rows: Ints, at: Ints) -> "HostBucket":
        return HostBucket(self, rows, at)

    def read(
        self,
        plan: int,
        rows: Ints,
        entries: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
        hidden: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None,
        found: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    ) -> "HostMissing":
        """Write into ``found`` [n, k] the device rows of those ``entries`` of requests ``rows``
        that lie on the host; what to copy there first."""
        which, places, reads = rows.astype(np.int32), self._shape.places, self._buffers.reads
        lie = EntryPlaces(places.host, places.buffer, self._shape.page_rows)
        selection = reads.away(lie, which, entries, hidden)
        swap = self._buffers.swap_in(plan, which, selection)
        copies = reads.place(lie, which, swap, found)
        return HostMissing(
            self._copy,
            PageRows(copies.device_pages, copies.device_offsets),
            PageRows(copies.host_pages, copies.host_offsets),
        )


@dataclass(frozen=True, slots=True, eq=False)
class HostMissing:
    """A ``Missing`` that knows which rows those are."""

    copy: CopyEntries
    device: PageRows
    host: PageRows

    def load(self, layer: LayerId) -> None:
        self.copy(layer, self.device, self.host)


@dataclass(frozen=True, slots=True, eq=False)
class HostBucket:
    """A ``SpilledBucket``: entries come to the CPU, rows go back."""

    swap_ins: HostSwapIns
    rows: Ints
    at: Ints

    def read(
        self,
        plan: int,
        found: torch.Tensor,
        entries: torch.Tensor | None,
        hidden: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Missing]:
        everyone = len(self.at) == len(self.rows)
        some = slice(None) if everyone else self.at
        if entries is None:
            chosen = np.broadcast_to(np.arange(found.shape[1]), (len(self.at), found.shape[1]))
        else:
            chosen = entries.numpy(force=True)[some]
        hides = None if hidden is None else hidden.numpy(force=True)[some]
        read = found.to("cpu", copy=True, memory_format=torch.contiguous_format)
        mine = read.numpy() if everyone else read.numpy()[self.at]
        missing = self.swap_ins.read(plan, self.rows[some], chosen, hides, mine)
        if not everyone:
            read.numpy()[self.at] = mine
        return read.to(found.device), missing

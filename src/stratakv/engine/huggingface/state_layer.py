"""States of layers that keep one instead of a row per token: convolutions and recurrences.

Owns their way from the pages where a call's requests left them to the pages where they go on. Must
not compute a state: Hugging Face's layers do, some of them in place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from stratakv.core.ids import GroupId, LayerId
from stratakv.engine.attention.paged_layer import Scratch
from stratakv.transfer.engine import LayerGate

_WORDS: Final = (torch.complex128, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class StateBuffer:
    """One layer's states of one kind, [pages, *shape]; they share memory with the pools.

    rows: [pages, elements]. words: the same bytes in the widest dtype that fits a row, since the
    kernels that write rows by index take as long for a byte as for 16.
    """

    shape: tuple[int, ...]
    rows: torch.Tensor
    words: torch.Tensor

    @classmethod
    def of(cls, pages: torch.Tensor) -> "StateBuffer":
        """pages: [pages, 1, *shape]."""
        assert pages.shape[1] == 1, f"{tuple(pages.shape)}: more than one state a page"
        rows = pages.view(len(pages), -1)
        row_bytes = rows.shape[1] * rows.element_size()
        fits = [dtype for dtype in _WORDS if row_bytes % dtype.itemsize == 0]
        return cls(tuple(pages.shape[2:]), rows, rows.view(fits[0]) if fits else rows)

    def read(self, name: str, source: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        """States [n, *shape] of the pages ``source``, int64 [n]; valid until ``name``'s next."""
        return scratch.gather(name, self.rows, source).view(-1, *self.shape)

    def write(self, own: torch.Tensor, states: torch.Tensor) -> None:
        """states: [n, *shape], to the pages ``own``, int64 [n]."""
        # A convolution of width 1 leaves every T-th of its inputs: a view that words cannot have.
        rows = states.to(self.rows.dtype).reshape(len(own), -1).contiguous()
        if rows.storage_offset() % (self.words.element_size() // self.rows.element_size()):
            rows = rows.clone()
        self.words.index_copy_(0, own, rows.view(self.words.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class StatePages:
    """One layer's states; ``recurrent`` is None where a convolution is all it has."""

    group: GroupId
    conv: StateBuffer
    recurrent: StateBuffer | None


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """Pages of one group for a call's requests, int64 [n] each: where their states are, or None if
    they have none yet, and where the states after the call belong."""

    source: torch.Tensor | None
    own: torch.Tensor


class OpenStates:
    """The states of the layer that is being computed, as Hugging Face's cache hands them out.

    A layer's states are read when it first asks and written when the next one does, or at the end:
    one-token kernels change what they were given and report nothing.
    """

    def __init__(
        self,
        layers: Mapping[LayerId, StatePages],
        rows: Mapping[GroupId, StateRows],
        gate: LayerGate | None,
        scratch: Scratch,
    ) -> None:
        self._layers = layers
        self._rows = rows
        self._gate = gate
        self._scratch = scratch
        self._open: LayerId | None = None
        self._conv: torch.Tensor | None = None
        self._recurrent: torch.Tensor | None = None

    @property
    def begun(self) -> bool:
        """Whether the requests of this call bring states."""
        return all(rows.source is not None for rows in self._rows.values())

    def conv(self, layer_id: LayerId) -> torch.Tensor | None:
        """[n, channels, width]: the last inputs of the convolution; the caller may change them."""
        self._enter(layer_id)
        return self._conv

    def recurrent(self, layer_id: LayerId) -> torch.Tensor | None:
        """[n, ...], float32; the caller may change them."""
        self._enter(layer_id)
        return self._recurrent

    def convolve(self, layer_id: LayerId, inputs: torch.Tensor) -> torch.Tensor:
        """Take new inputs [n, channels, T]; returns them with the inputs before, zeros for none."""
        self._enter(layer_id)
        width = self._layers[layer_id].conv.shape[-1]
        if self._conv is None:
            missing = max(0, width - inputs.shape[-1])
            seen = torch.nn.functional.pad(inputs, (missing, 0))
        else:
            seen = torch.cat((self._conv, inputs), -1)
        self._conv = seen[..., -width:]
        return seen

    def recur(self, layer_id: LayerId, states: torch.Tensor) -> None:
        """Take the states [n, ...] after the call's tokens."""
        self._enter(layer_id)
        self._recurrent = states

    def close(self) -> None:
        """Write the open layer's states to their pages."""
        if self._open is None:
            return
        pages = self._layers[self._open]
        own = self._rows[pages.group].own
        assert self._conv is not None, f"layer {self._open} left no state"
        pages.conv.write(own, self._conv)
        if pages.recurrent is not None:
            assert self._recurrent is not None, f"layer {self._open} left no recurrent state"
            pages.recurrent.write(own, self._recurrent)
        self._open = self._conv = self._recurrent = None

    def _enter(self, layer_id: LayerId) -> None:
        if layer_id == self._open:
            return
        self.close()
        if self._gate is not None:
            self._gate.wait(layer_id)
        self._open = layer_id
        pages = self._layers[layer_id]
        source = self._rows[pages.group].source
        if source is not None:
            self._conv = pages.conv.read("conv", source, self._scratch)
            if pages.recurrent is not None:
                self._recurrent = pages.recurrent.read("recurrent", source, self._scratch)

"""Hugging Face's ``Cache``, as a view of one step onto the pools.

Owns writing the step's keys and values into pages, after the layer's gate has opened. Holds no
keys itself; what is read back is ``attention``'s business.
"""

import torch
from transformers import Cache

from stratakv.core.ids import LayerId
from stratakv.engine.attention import PagedStep


class PagedCache(Cache):
    """One step's cache: ``update`` is the only verb that models with plain attention need."""

    def __init__(self, step: PagedStep) -> None:
        super().__init__(layers=[])
        self._step = step

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the packed rows [1, heads, T, dim] of one layer; returns them unchanged."""
        del args, kwargs
        step, layer_id = self._step, LayerId(layer_idx)
        if step.gate is not None:
            step.gate.wait(layer_id)
        layer = step.layers[layer_id]
        slots = step.groups[layer.group].slots
        # Rows are copied as the pool's dtype: on bytes this would be tens of times slower.
        _write(layer.key_rows, slots, key_states)
        _write(layer.value_rows, slots, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Tokens before the step's first one: 0 for the model, which is told every position.

        A layer that asks for itself (Llama 4 scales queries by position) adds ``arange(T)``: it
        gets each packed token's position less its place in the batch, int64 [T].
        """
        return 0 if layer_idx is None else self._step.shifts

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """No mask is ever built: ``paged_attention`` knows what is visible."""
        del layer_idx
        return query_length, 0


def _write(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """pool [rows, heads * dim], slots int64 [T], rows [1, heads, T, dim]."""
    packed = rows[0].transpose(0, 1).reshape(len(slots), -1)
    pool.index_copy_(0, slots, packed.to(pool.dtype))

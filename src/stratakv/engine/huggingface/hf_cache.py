"""Hugging Face's ``Cache``, as a view of one call onto the pools.

Owns writing the call's keys, values and latents into pages, after the layer's gate has opened, and
handing states to the layers that keep one. Holds no keys itself; what is read back is
``attention``'s business.
"""

from typing import assert_never

import torch
from transformers import Cache

from stratakv.core.ids import LayerId
from stratakv.engine.attention.paged_layer import LatentPages, LayerPages
from stratakv.engine.huggingface.attention import PagedStep
from stratakv.engine.huggingface.state_layer import OpenStates


class PagedCache(Cache):
    """One call's cache, with the verbs that Hugging Face's models ask for."""

    def __init__(self, step: PagedStep, states: OpenStates) -> None:
        super().__init__(layers=[])
        self._step = step
        self._states = states

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows of one layer, [n, heads, T / n, dim] each. Returns them unchanged; of
        latents, those of every request's context, [1, 1, tokens, dim] each."""
        del args, kwargs
        step, layer_id = self._step, LayerId(layer_idx)
        if step.gate is not None:
            step.gate.wait(layer_id)
        step.cursor.move(layer_id)
        layer = step.layers[layer_id]
        group, write = step.groups[layer.group], step.kernels.write
        match layer:
            case LayerPages():
                write(layer.key_rows, group.slots, _packed(key_states))
                write(layer.value_rows, group.slots, _packed(value_states))
                return key_states, value_states
            case LatentPages():
                rows = torch.cat((key_states, value_states), -1)
                write(layer.rows, group.slots, _packed(rows))
                found = group.gather(layer)[None, None].to(rows.dtype)
                latents, keys = found.split((key_states.shape[-1], value_states.shape[-1]), -1)
                return latents, keys
            case _:
                assert_never(layer)

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Tokens before the step's first one: 0 for the model, which is given every position.

        A layer that asks for itself (Llama 4 scales queries by position) adds ``arange(T)``: it
        gets each packed token's position less its place in the batch, int64 [T].
        """
        if layer_idx is None:
            return 0
        positions = self._step.positions
        return positions - torch.arange(len(positions), device=positions.device)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """No mask is ever built: ``paged_attention`` knows what is visible."""
        del layer_idx
        return query_length, 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """[n, channels, width], which a one-token kernel changes in place; None at position 0."""
        assert state_idx == 0, f"layer {layer_idx} asks for state {state_idx}"
        return self._states.conv(LayerId(layer_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """New inputs [n, channels, T]; returns them behind the inputs before them."""
        del kwargs
        assert state_idx == 0, f"layer {layer_idx} has a state {state_idx}"
        return self._states.convolve(LayerId(layer_idx), conv_states)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """[n, ...] in float32, which a one-token kernel may change in place; None at position 0."""
        assert state_idx == 0, f"layer {layer_idx} asks for state {state_idx}"
        return self._states.recurrent(LayerId(layer_idx))

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """The states [n, ...] after the call's tokens; returns them."""
        del kwargs
        assert state_idx == 0, f"layer {layer_idx} has a state {state_idx}"
        self._states.recur(LayerId(layer_idx), recurrent_states)
        return recurrent_states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether the call's requests bring states; all of them do or none."""
        del layer_idx, state_idx
        return self._states.begun

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never: nothing is rolled back."""
        del layer_idx
        return False


def _packed(rows: torch.Tensor) -> torch.Tensor:
    """[n, heads, T / n, dim] -> [T, heads * dim]."""
    return rows.transpose(1, 2).flatten(0, 1).flatten(1)

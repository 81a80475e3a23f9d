"""Runs a step's batch through a Hugging Face model on the paged pools.

Owns the way from ``StepBatch`` to logits. Must not allocate pages or choose tokens.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from stratakv.core.errors import ConfigError
from stratakv.core.ids import NONE, GroupId, LayerId, PageIds
from stratakv.engine.attention.kernels import AttentionGroup, AttentionKernels
from stratakv.engine.attention.paged_layer import KeyBounds, LatentPages, LayerPages, Scratch
from stratakv.engine.attention.step_meta import StepShape
from stratakv.engine.attention.torch_pools import LayerTensors
from stratakv.engine.batch import Int32s, StepBatch
from stratakv.engine.forward import Forward
from stratakv.engine.huggingface.attention import TokenPages
from stratakv.engine.huggingface.model import HuggingFaceModel
from stratakv.engine.huggingface.model_call import CallInputs, ModelCall
from stratakv.engine.huggingface.state_layer import StateBuffer, StatePages, StateRows
from stratakv.engine.huggingface.step_calls import (
    ForwardCall,
    Places,
    Split,
    packed,
    side_by_side,
    token_by_token,
)
from stratakv.engine.tensors import on_device
from stratakv.engine.token_ids import token_ids
from stratakv.memory.block_table import BlockTable
from stratakv.spec.derive import shared_layers
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.spec.offload import bounds_places
from stratakv.spec.support import (
    continues_token_by_token,
    key_value_places,
    latent_places,
    refusal,
    state_places,
)


class ModelRunner:
    """One model on one device. Raises ConfigError for a cache that it cannot run."""

    def __init__(
        self,
        model: HuggingFaceModel,
        spec: CacheSpec,
        pools: LayerTensors,
        tables: BlockTable,
        kernels: AttentionKernels,
    ) -> None:
        if reason := refusal(spec):
            raise ConfigError(f"MODEL: it cannot be run: {reason}")
        self._adapters = model.adapters
        self._device = model.device
        self._tables = tables
        states = state_pages(spec, pools)
        self.call = ModelCall(model, token_pages(spec, pools, model.config), states, kernels)
        self._kernels = kernels
        self.groups = attention_groups(spec)
        self.stateful = tuple({pages.group: None for pages in states.values()})
        self._split = _split_of(model.config) if states else packed
        self._scratch = Scratch()

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Forward:
        """Compute every token of ``batch``; what is to be kept of them goes to their rows' pages.

        AssertionError where a token that is needed has no page.
        """
        calls = self._split(batch)
        outputs = [self._run(call, adapters_of(batch, call)) for call in calls]
        if len(calls) == 1:
            return outputs[0]
        places = np.concatenate([call.places[call.batch.sampled] for call in calls])
        finite = torch.ones(len(batch.rows), dtype=torch.bool, device=self._device)
        for call, one in zip(calls, outputs, strict=True):
            its = on_device(call.places, self._device)
            finite.index_copy_(0, its, finite[its] & one.finite)
        logits = torch.cat([one.logits for one in outputs])
        order = on_device(np.argsort(places), self._device)
        return Forward(logits[order], finite, batch.sampled, self._scored(calls, outputs))

    def _scored(
        self, calls: Sequence[ForwardCall], outputs: Sequence[Forward]
    ) -> torch.Tensor | None:
        """Those of all calls, in the order of the step's tokens."""
        some = [one.scored for one in outputs if one.scored is not None]
        at = [call.scored for call in calls if call.scored is not None]
        if not some:
            return None
        return torch.cat(some)[on_device(np.argsort(np.concatenate(at)), self._device)]

    def _run(self, call: ForwardCall, adapters: Int32s | None) -> Forward:
        """Of the call's requests, in order."""
        batch, shape = call.batch, StepShape.of(call.batch)
        lasts = (shape.offsets + shape.ends - shape.starts - 1)[batch.sampled]
        # Chunks that lie side by side end in one column; the rows that nobody wants go later.
        width = len(shape.positions) // call.height
        kept = lasts if call.height == 1 else np.full(min(len(lasts), 1), width - 1)
        if batch.scored is not None:
            kept = np.arange(width) if call.height > 1 else _with(lasts, batch.scored)
        inputs = CallInputs(
            tokens=token_ids(batch, self._device),
            positions=on_device(shape.positions, self._device),
            kept=on_device(kept, self._device),
            height=call.height,
            groups={
                group.id: self._kernels.plan(group, shape, self._tables.pages(group.id))
                for group in self.groups
            },
            states={group: self._state_rows(group, call) for group in self.stateful},
        )
        with self._adapters.applied(adapters):
            outputs = self.call(inputs, self._scratch, batch.gate)
        found, hidden, scored = outputs.logits, outputs.hidden, None
        if batch.scored is not None:
            at = np.arange(len(batch.tokens)) if call.height > 1 else kept
            scored = found[on_device(np.flatnonzero(batch.scored[at]), self._device)]
            found = found[on_device(np.searchsorted(at, lasts), self._device)].float()
            return Forward.of_hidden(found, hidden, batch, scored)
        found = found.float()
        if call.height > 1 and 0 < len(lasts) < call.height:
            found = found[on_device(np.flatnonzero(batch.sampled), self._device)]
        return Forward.of_hidden(found, hidden, batch)

    def _state_rows(self, group: GroupId, call: ForwardCall) -> StateRows:
        rows, slots = call.batch.rows, self._tables.slots
        own = slots.own(group)[rows]
        if call.again:
            return StateRows(self._pages(own), self._pages(own))
        if call.batch.starts[0] == 0:
            return StateRows(None, self._pages(own))
        return StateRows(self._pages(slots.source(group)[rows]), self._pages(own))

    def _pages(self, pages: PageIds) -> torch.Tensor:
        assert pages.min() > NONE, "a request's state has no page"
        return on_device(pages.astype(np.int64), self._device)


def _with(lasts: Places, scored: npt.NDArray[np.bool_]) -> Places:
    """Both, in order: [n] of the tokens of a call."""
    marks = scored.copy()
    marks[lasts] = True
    return np.flatnonzero(marks)


def attention_groups(spec: CacheSpec) -> list[AttentionGroup]:
    """Those that keep something of every token."""
    return [
        AttentionGroup(
            id=group.id,
            rule=group.retention,
            page_tokens=spec.page_tokens,
            layer_bytes=group.buffers[0].layer_bytes,
        )
        for group in spec.groups
        if group.buffers and not group.stateful
    ]


def adapters_of(batch: StepBatch, call: ForwardCall) -> Int32s | None:
    """The adapter of every token of ``call``, int32 [T]; None if no request of the step has one."""
    if batch.adapters is None:
        return None
    return np.repeat(batch.adapters[call.places], call.batch.counts)


def token_pages(
    spec: CacheSpec, pools: LayerTensors, config: Mapping[str, object]
) -> dict[LayerId, TokenPages]:
    """Where each layer of attention keeps its tokens; a layer that owns none reads its owner's."""
    bounds = {
        layer: KeyBounds(layer, pools.layer(ANCHOR, buffer.name, layer).squeeze(1))
        for layer, buffer in bounds_places(spec).items()
    }
    found: dict[LayerId, TokenPages] = {
        layer: LayerPages.of(
            place.group,
            pools.layer(place.group, place.key.name, layer),
            pools.layer(place.group, place.value.name, layer),
            bounds.get(layer),
        )
        for layer, place in key_value_places(spec).items()
    }
    for layer, place in latent_places(spec).items():
        latents = pools.layer(place.group, place.latent.name, layer)
        found[layer] = LatentPages.of(place.group, latents)
    return found | {reader: found[owner] for reader, owner in shared_layers(config).items()}


def state_pages(spec: CacheSpec, pools: LayerTensors) -> dict[LayerId, StatePages]:
    """Where each layer with a state keeps it."""
    found: dict[LayerId, StatePages] = {}
    for layer, place in state_places(spec).items():
        conv = StateBuffer.of(pools.layer(place.group, place.conv.name, layer))
        recurrent = None
        if place.recurrent is not None:
            recurrent = StateBuffer.of(pools.layer(place.group, place.recurrent.name, layer))
        found[layer] = StatePages(place.group, conv, recurrent)
    return found


def _split_of(config: Mapping[str, object]) -> Split:
    return token_by_token if continues_token_by_token(config) else side_by_side

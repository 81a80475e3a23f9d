"""Runs a step's batch through our own DeepSeek-V3.2 on the paged pools.

Owns the way from ``StepBatch`` to logits, as ``engine.huggingface.runner`` does for modules
of Hugging Face's. Must not allocate pages or choose tokens.
"""

from functools import partial

import numpy as np
import torch

from stratakv.core.ids import LayerId
from stratakv.engine.attention.kernels import AttentionKernels
from stratakv.engine.attention.spilled_rows import SpilledRows
from stratakv.engine.attention.step_meta import StepShape
from stratakv.engine.attention.step_plan import BUCKET_BYTES, GroupPlanner
from stratakv.engine.attention.swap_ins import SwapShape
from stratakv.engine.attention.torch_pools import LayerTensors
from stratakv.engine.batch import StepBatch
from stratakv.engine.deepseek.v32_model import take_over
from stratakv.engine.deepseek.v32_step import GroupSteps, LayerPlace, V32Step
from stratakv.engine.forward import Forward
from stratakv.engine.huggingface.model import HuggingFaceModel
from stratakv.engine.tensors import on_device
from stratakv.engine.token_ids import token_ids
from stratakv.memory.block_table import BlockTable
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.spec.kinds import INDEX_KEY, LATENT
from stratakv.spec.offload import selected_group
from stratakv.spec.support import kind_of
from stratakv.transfer.host_rows import HostRows


class DeepSeekV32Runner:
    """One model on one device. Decoding rows are computed side by side, in buckets of like length;
    chunks of prompts share everything but attention."""

    def __init__(
        self,
        model: HuggingFaceModel,
        spec: CacheSpec,
        pools: LayerTensors,
        tables: BlockTable,
        kernels: AttentionKernels,
        host: HostRows | None = None,
    ) -> None:
        """``host``: reads host pages, where latents have their home there."""
        self.model, self._rope = take_over(model.module, model.ranks)
        self._dtype = model.module.dtype
        self._device = model.device
        self._tables = tables
        self._page_tokens = spec.page_tokens
        self._layers = layer_places(spec, pools)
        self._kernels = kernels
        self._latents = selected_group(spec)
        self._spilled = None
        if host is not None:
            shape = SwapShape(
                tables.spilled[self._latents],
                spec.page_tokens,
                model.module.config.index_topk,
                1 + max(place.plan for place in self._layers.values()),
            )
            table, its = partial(tables.pages, self._latents), kernels.swap_ins(host, shape)
            self._spilled = SpilledRows(host, table, shape, spec.page_tokens, its)
        # The same for both groups, which must cut a step alike.
        both = {ANCHOR, self._latents}
        row_bytes = sum(b.layer_bytes for g in both for b in spec.groups[g].buffers)
        self._planner = GroupPlanner(
            rule=spec.groups[ANCHOR].retention,
            page_tokens=spec.page_tokens,
            slack_pages=BUCKET_BYTES // row_bytes,
            device=model.device,
            dtype=self._dtype,
        )

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Forward:
        """Compute every token of ``batch``; what is to be kept of them goes to their rows' pages.

        AssertionError for a batch with adapters.
        """
        assert batch.adapters is None, "this model has no adapters"
        shape = StepShape.of(batch)
        positions = on_device(shape.positions, self._device)
        groups = self._plan(shape)
        step = V32Step(
            layers=self._layers,
            slots=groups.keys.slots,
            latent_slots=groups.latents.slots,
            rotation=self._rope.at(positions, self._dtype),
            buckets=groups.buckets(self._page_tokens),
            chunks=groups.chunks(self._page_tokens),
            gate=batch.gate,
            kernels=self._kernels,
        )
        lasts = (shape.offsets + shape.ends - shape.starts - 1)[batch.sampled]
        hidden = self.model.model(token_ids(batch, self._device), step)
        logits = self.model.logits(hidden[on_device(lasts, self._device)])
        scored = None
        if batch.scored is not None:
            scored = self.model.logits(
                hidden[on_device(np.flatnonzero(batch.scored), self._device)]
            )
        return Forward.of_hidden(logits, hidden, batch, scored)

    def _plan(self, shape: StepShape) -> GroupSteps:
        keys = self._planner.plan(shape, self._tables.pages(ANCHOR))
        if self._latents == ANCHOR:
            return GroupSteps(shape, keys, keys, None)
        spilled = None if self._spilled is None else self._spilled.step(shape)
        table = self._tables.pages(self._latents) if spilled is None else spilled.table
        return GroupSteps(shape, keys, self._planner.plan(shape, table), spilled)


def layer_places(spec: CacheSpec, pools: LayerTensors) -> dict[LayerId, LayerPlace]:
    """Where every layer keeps its latents and index keys: both in the anchor, or latents in a group
    of their own."""
    found: dict[str, dict[LayerId, torch.Tensor]] = {LATENT: {}, INDEX_KEY: {}}
    for group in {ANCHOR, selected_group(spec)}:
        for buffer in spec.groups[group].buffers:
            for layer in buffer.layers:
                rows = pools.layer(group, buffer.name, layer).flatten(0, 1)
                found[kind_of(buffer)][layer] = rows
    keys = found[INDEX_KEY]
    # A layer without keys reads what the last one before it has selected.
    plan = {layer: sum(other <= layer for other in keys) - 1 for layer in found[LATENT]}
    return {
        layer: LayerPlace(rows, keys.get(layer), plan[layer])
        for layer, rows in found[LATENT].items()
    }

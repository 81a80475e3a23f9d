"""Runs a step's batch through our own DeepSeek-V4 on the paged pools.

Owns the way from ``StepBatch`` to logits, which numbers of a configuration are a rank's, and where
ranks sum (what is split is in ``common_shard``). Must not allocate pages or choose tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import nn

from stratakv.core.ids import GroupId, LayerId
from stratakv.engine.attention.kernels import AttentionKernels
from stratakv.engine.attention.spilled_rows import SpilledRows, SpilledStep
from stratakv.engine.attention.step_meta import StepShape
from stratakv.engine.attention.swap_ins import SwapShape
from stratakv.engine.attention.torch_pools import LayerTensors
from stratakv.engine.batch import StepBatch
from stratakv.engine.deepseek.common_rope import Rope
from stratakv.engine.deepseek.common_shard import heads_split, rank_weights, sum_over_ranks
from stratakv.engine.deepseek.v4_attention import V4Pages
from stratakv.engine.deepseek.v4_blocks import BlockPlanner, Tables, present
from stratakv.engine.deepseek.v4_compress import BlockPages
from stratakv.engine.deepseek.v4_config import ROPES, V4Config
from stratakv.engine.deepseek.v4_model import V4Layer, V4Model
from stratakv.engine.deepseek.v4_queries import QueryPlanner
from stratakv.engine.deepseek.v4_step import V4Step
from stratakv.engine.forward import Forward
from stratakv.engine.huggingface.model import HuggingFaceModel
from stratakv.engine.tensors import on_device
from stratakv.engine.token_ids import token_ids
from stratakv.memory.block_table import BlockTable
from stratakv.spec.compressed import BlockPlace, CompressedPlaces, compressed_places
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.spec.offload import selected_group
from stratakv.transfer.host_rows import HostRows


class DeepSeekV4Runner:
    """One model on one device; it shares its weights with the Hugging Face module."""

    def __init__(
        self,
        model: HuggingFaceModel,
        spec: CacheSpec,
        pools: LayerTensors,
        tables: BlockTable,
        kernels: AttentionKernels,
        host: HostRows | None = None,
    ) -> None:
        """``host``: reads host pages, where indexed entries have their home there."""
        assert not model.adapters.digests, "adapters were not refused"
        config = V4Config.of(model.config)
        places = compressed_places(spec)
        assert sorted(places) == list(range(len(config.rates))), "a layer without a cache"
        self.model = rank_model(model, config)
        self._selected = selected_group(spec)
        self._pages = _pages_of(places, pools, self._selected)
        self._spilled = None
        if host is not None:
            shape = SwapShape(
                tables.spilled[self._selected],
                spec.groups[self._selected].page_rows,
                config.index_topk,
                sum(config.indexed),
            )
            table, its = partial(tables.pages, self._selected), kernels.swap_ins(host, shape)
            self._spilled = SpilledRows(host, table, shape, spec.page_tokens, its)
        self._ropes = {kind: Rope.of(model.module.config, kind) for kind in ROPES}
        self._dtype, self._device = model.module.dtype, model.device
        self._tables, self._page_tokens = tables, spec.page_tokens
        self._kernels = kernels
        blocks = {p.blocks.ratio: p.blocks for p in places.values() if p.blocks is not None}
        self._local = places[LayerId(0)].local.group
        self._open = _open_group(blocks)
        self._blocks = {ratio: self._block_planner(place) for ratio, place in blocks.items()}
        self._groups = {ratio: place.entries.group for ratio, place in blocks.items()}
        self._queries = QueryPlanner(
            rule=spec.groups[self._local].retention,
            ratios=tuple(sorted(blocks)),
            indexed=_indexed_ratio(places),
            page_tokens=spec.page_tokens,
            device=model.device,
        )

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Forward:
        """Compute every token of ``batch``; what is to be kept of them goes to their rows' pages.

        AssertionError where a token that is needed has no page.
        """
        shape = StepShape.of(batch)
        streams = self.model(self._pages, self._plan(batch, shape))
        lasts = (shape.offsets + shape.ends - shape.starts - 1)[batch.sampled]
        logits, scored = self.model.logits(streams[on_device(lasts, self._device)]), None
        if batch.scored is not None:
            scored = self.model.logits(
                streams[on_device(np.flatnonzero(batch.scored), self._device)]
            )
        return Forward.of_hidden(logits, streams, batch, scored)

    def _plan(self, batch: StepBatch, shape: StepShape) -> V4Step:
        spilled = None if self._spilled is None else self._spilled.step(shape)
        tables = self._tables_now(spilled)
        positions = on_device(shape.positions, self._device)
        index, inside = np.divmod(shape.positions, self._page_tokens)
        slots = present(tables.local[shape.token_rows, index]) * self._page_tokens + inside
        return V4Step(
            token_ids=token_ids(batch, self._device),
            slots=on_device(slots, self._device),
            rotations={kind: rope.at(positions, self._dtype) for kind, rope in self._ropes.items()},
            blocks={ratio: plan.plan(shape, tables) for ratio, plan in self._blocks.items()},
            queries=tuple(self._queries.plan(shape, tables, spilled)),
            gate=batch.gate,
            kernels=self._kernels,
        )

    def _tables_now(self, spilled: SpilledStep | None) -> Tables:
        slots = self._tables.slots
        pages = {group: self._tables.pages(group) for group in {ANCHOR, *self._groups.values()}}
        if spilled is not None:
            pages[self._selected] = spilled.table
        return Tables(
            anchor=pages[ANCHOR],
            entries={ratio: pages[group] for ratio, group in self._groups.items()},
            local=self._tables.pages(self._local),
            source=slots.source(self._open),
            own=slots.own(self._open),
        )

    def _block_planner(self, place: BlockPlace) -> BlockPlanner:
        return BlockPlanner(
            ratio=place.ratio,
            overlaps=place.overlap is not None,
            page_tokens=self._page_tokens,
            rope=self._ropes["compress"],
            device=self._device,
            dtype=self._dtype,
        )


def _open_group(blocks: dict[int, BlockPlace]) -> GroupId:
    """Of the open blocks; where no layer has any it does not matter which."""
    return next((place.open.group for place in blocks.values()), ANCHOR)


def _indexed_ratio(places: Mapping[LayerId, CompressedPlaces]) -> int | None:
    return next((place.index.ratio for place in places.values() if place.index is not None), None)


def _pages_of(
    places: Mapping[LayerId, CompressedPlaces], pools: LayerTensors, selected: GroupId
) -> list[V4Pages]:
    """Of every layer, in order; ``selected``: the group of what may be on the host."""
    found: list[V4Pages] = []
    plans = count()
    for layer, place in sorted(places.items()):
        local = pools.layer(place.local.group, place.local.buffer.name, layer).flatten(0, 1)
        blocks, index = (
            None if one is None else BlockPages.of(one, pools, layer)
            for one in (place.blocks, place.index)
        )
        away = place.blocks is not None and place.blocks.entries.group == selected != ANCHOR
        found.append(V4Pages(layer, local, blocks, index, next(plans) if away else None))
    return found


def rank_model(model: HuggingFaceModel, config: V4Config) -> V4Model:
    """config: of the whole model. Its tensors become ours, no copies."""
    heads = heads_split(model.config, model.ranks)
    found = V4Model.of(_rank_config(config, model.ranks, heads=heads), rank_weights(model.module))
    if model.ranks > 1:
        sum_over_ranks(_summed_parts(found, heads=heads))
    return found


def _rank_config(config: V4Config, ranks: int, *, heads: bool) -> V4Config:
    share = replace(config, expert_inner=config.expert_inner // ranks)
    if not heads:
        return share
    return replace(share, heads=config.heads // ranks, out_groups=config.out_groups // ranks)


def _summed_parts(model: V4Model, *, heads: bool) -> Iterator[nn.Module]:
    for layer in model.model.layers:
        assert isinstance(layer, V4Layer)
        yield layer.mlp
        if heads:
            yield layer.self_attn.o_b_proj

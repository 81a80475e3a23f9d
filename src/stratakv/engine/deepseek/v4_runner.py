"""Runs a step's batch through our own DeepSeek-V4 on the paged pools.

Owns the way from ``StepBatch`` to logits. Must not allocate pages or choose tokens.
"""

import numpy as np
import torch

from stratakv.core.ids import GroupId, LayerId
from stratakv.engine.batch import StepBatch
from stratakv.engine.deepseek.common_rope import Rope
from stratakv.engine.deepseek.v4_attention import V4Pages
from stratakv.engine.deepseek.v4_blocks import BlockPlanner, Tables, present
from stratakv.engine.deepseek.v4_compress import BlockPages
from stratakv.engine.deepseek.v4_config import ROPES, V4Config
from stratakv.engine.deepseek.v4_queries import QueryPlanner
from stratakv.engine.deepseek.v4_shard import rank_model
from stratakv.engine.deepseek.v4_step import V4Step
from stratakv.engine.forward import Forward
from stratakv.engine.model import HuggingFaceModel
from stratakv.engine.step_meta import StepShape
from stratakv.engine.tensors import on_device
from stratakv.engine.torch_pools import TorchPools
from stratakv.memory.block_table import BlockTable
from stratakv.spec.compressed import BlockPlace, CompressedPlaces, compressed_places
from stratakv.spec.groups import ANCHOR, CacheSpec


class DeepSeekV4Runner:
    """One model on one device; it shares its weights with the Hugging Face module."""

    def __init__(
        self, model: HuggingFaceModel, spec: CacheSpec, pools: TorchPools, tables: BlockTable
    ) -> None:
        assert not model.adapters.digests, "adapters were not refused"
        config = V4Config.of(model.config)
        places = compressed_places(spec)
        assert sorted(places) == list(range(len(config.rates))), "a layer without a cache"
        self._model = rank_model(model, config)
        self._pages = [
            _pages_of(places[LayerId(i)], pools, LayerId(i)) for i in range(len(config.rates))
        ]
        self._ropes = {kind: Rope.of(model.module.config, kind) for kind in ROPES}
        self._dtype, self._device = model.module.dtype, model.device
        self._tables, self._page_tokens = tables, spec.page_tokens
        blocks = {p.blocks.ratio: p.blocks for p in places.values() if p.blocks is not None}
        self._local = places[LayerId(0)].local.group
        self._open = _open_group(blocks)
        self._blocks = {ratio: self._block_planner(place) for ratio, place in blocks.items()}
        self._queries = QueryPlanner(
            rule=spec.groups[self._local].retention,
            ratios=tuple(sorted(blocks)),
            page_tokens=spec.page_tokens,
            device=model.device,
        )

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Forward:
        """Compute every token of ``batch``; what is to be kept of them goes to their rows' pages.

        AssertionError where a token that is needed has no page.
        """
        shape = StepShape.of(batch)
        streams = self._model(self._pages, self._plan(batch, shape))
        lasts = (shape.offsets + shape.ends - shape.starts - 1)[batch.sampled]
        return Forward.of_hidden(
            self._model.logits(streams[on_device(lasts, self._device)]), streams, batch
        )

    def _plan(self, batch: StepBatch, shape: StepShape) -> V4Step:
        tables = self._tables_now()
        positions = on_device(shape.positions, self._device)
        index, inside = np.divmod(shape.positions, self._page_tokens)
        slots = present(tables.local[shape.token_rows, index]) * self._page_tokens + inside
        return V4Step(
            token_ids=on_device(batch.tokens, self._device).long(),
            slots=on_device(slots, self._device),
            rotations={kind: rope.at(positions, self._dtype) for kind, rope in self._ropes.items()},
            blocks={ratio: plan.plan(shape, tables) for ratio, plan in self._blocks.items()},
            queries=tuple(self._queries.plan(shape, tables)),
            gate=batch.gate,
        )

    def _tables_now(self) -> Tables:
        slots = self._tables.slots
        return Tables(
            anchor=self._tables.pages(ANCHOR),
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


def _pages_of(places: CompressedPlaces, pools: TorchPools, layer: LayerId) -> V4Pages:
    local = pools.layer(places.local.group, places.local.buffer.name, layer).flatten(0, 1)
    found = [
        None if place is None else BlockPages.of(place, pools, layer)
        for place in (places.blocks, places.index)
    ]
    return V4Pages(local, *found)

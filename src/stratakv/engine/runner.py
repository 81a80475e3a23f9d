"""Runs a step's batch through a Hugging Face model on the paged pools.

Owns the way from ``StepBatch`` to logits. Must not allocate pages or choose tokens.
"""

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch

from stratakv.core.errors import ConfigError
from stratakv.core.ids import LayerId
from stratakv.engine.attention import STEP, PagedStep
from stratakv.engine.batch import StepBatch
from stratakv.engine.hf_cache import PagedCache
from stratakv.engine.model import HuggingFaceModel
from stratakv.engine.paged_layer import LayerPages, Scratch
from stratakv.engine.step_meta import StepShape
from stratakv.engine.step_plan import BUCKET_BYTES, GroupPlanner
from stratakv.memory.block_table import BlockTable
from stratakv.memory.device_pools import DevicePools
from stratakv.spec.derive import shared_layers
from stratakv.spec.groups import CacheSpec
from stratakv.spec.support import key_value_places, refusal


class ModelRunner:
    """One model on one device. Raises ConfigError for a cache that is not keys and values."""

    def __init__(
        self, model: HuggingFaceModel, spec: CacheSpec, pools: DevicePools, tables: BlockTable
    ) -> None:
        self._module = model.module
        self._device = model.device
        self._tables = tables
        self._layers = layer_pages(spec, pools, model.config)
        self._planners = {
            group.id: GroupPlanner(
                rule=group.retention,
                page_tokens=spec.page_tokens,
                slack_pages=BUCKET_BYTES // group.buffers[0].layer_bytes,
                device=model.device,
                dtype=model.module.dtype,
            )
            for group in spec.groups
            if group.buffers
        }
        self._scratch = Scratch()

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Compute every token of ``batch``; their keys and values go to the pages of their rows.

        Returns float32 logits [S, vocab] after the last token of each sampled request, in order.
        """
        shape = StepShape.of(batch)
        packed = np.arange(len(shape.positions))
        step = PagedStep(
            layers=self._layers,
            groups={
                group: planner.plan(shape, self._tables.pages(group))
                for group, planner in self._planners.items()
            },
            shifts=self._ship(shape.positions - packed),
            gate=batch.gate,
            scratch=self._scratch,
        )
        lasts = (shape.offsets + shape.ends - shape.starts - 1)[batch.sampled]
        logits = self._module(
            input_ids=self._ship(batch.tokens)[None].long(),
            position_ids=self._ship(shape.positions)[None],
            past_key_values=PagedCache(step),
            use_cache=True,
            logits_to_keep=self._ship(lasts),
            **{STEP: step},
        ).logits
        return cast("torch.Tensor", logits)[0].float()

    def _ship(self, array: np.ndarray[tuple[int], np.dtype[np.integer]]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def layer_pages(
    spec: CacheSpec, pools: DevicePools, config: Mapping[str, object]
) -> dict[LayerId, LayerPages]:
    """Where each layer's keys and values live; a layer that owns none reads its owner's."""
    if reason := refusal(spec):
        raise ConfigError(f"the model cannot be run: {reason}")
    found = {
        layer: LayerPages.of(
            place.group,
            pools.layer(place.group, place.key.name, layer),
            pools.layer(place.group, place.value.name, layer),
        )
        for layer, place in key_value_places(spec).items()
    }
    return found | {reader: found[owner] for reader, owner in shared_layers(config).items()}

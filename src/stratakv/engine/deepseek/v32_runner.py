"""Runs a step's batch through our own DeepSeek-V3.2 on the paged pools.

Owns the way from ``StepBatch`` to logits, as ``engine.runner`` does for Hugging Face's modules.
Must not allocate pages or choose tokens.
"""

import torch

from stratakv.core.ids import LayerId
from stratakv.engine.batch import StepBatch
from stratakv.engine.deepseek.v32_model import take_over
from stratakv.engine.deepseek.v32_step import LayerPlace, V32Step
from stratakv.engine.forward import Forward
from stratakv.engine.kernels import AttentionKernels
from stratakv.engine.model import HuggingFaceModel
from stratakv.engine.step_meta import StepShape
from stratakv.engine.step_plan import BUCKET_BYTES, GroupPlanner
from stratakv.engine.tensors import on_device
from stratakv.engine.torch_pools import LayerTensors
from stratakv.memory.block_table import BlockTable
from stratakv.spec.groups import ANCHOR, CacheSpec
from stratakv.spec.kinds import INDEX_KEY, LATENT
from stratakv.spec.support import kind_of


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
    ) -> None:
        anchor = spec.groups[ANCHOR]
        self.model, self._rope = take_over(model.module, model.ranks)
        self._dtype = model.module.dtype
        self._device = model.device
        self._tables = tables
        self._page_tokens = spec.page_tokens
        self._layers = layer_places(spec, pools)
        self._kernels = kernels
        self._planner = GroupPlanner(
            rule=anchor.retention,
            page_tokens=spec.page_tokens,
            slack_pages=BUCKET_BYTES // sum(buffer.layer_bytes for buffer in anchor.buffers),
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
        step = V32Step.of(
            self._layers,
            self._planner.plan(shape, self._tables.pages(ANCHOR)),
            self._page_tokens,
            self._rope.at(positions, self._dtype),
            batch.gate,
            self._kernels,
        )
        lasts = (shape.offsets + shape.ends - shape.starts - 1)[batch.sampled]
        hidden = self.model.model(on_device(batch.tokens, self._device).long(), step)
        logits = self.model.logits(hidden[on_device(lasts, self._device)])
        return Forward.of_hidden(logits, hidden, batch)


def layer_places(spec: CacheSpec, pools: LayerTensors) -> dict[LayerId, LayerPlace]:
    """Where every layer keeps its latents and index keys: both beside each other in the anchor."""
    found: dict[str, dict[LayerId, torch.Tensor]] = {LATENT: {}, INDEX_KEY: {}}
    for buffer in spec.groups[ANCHOR].buffers:
        for layer in buffer.layers:
            rows = pools.layer(ANCHOR, buffer.name, layer).flatten(0, 1)
            found[kind_of(buffer)][layer] = rows
    keys = found[INDEX_KEY]
    return {layer: LayerPlace(rows, keys.get(layer)) for layer, rows in found[LATENT].items()}

"""Which linear layers see other tokens than their model's call: those cannot be adapted.

Owns one small call of a model, made at start. A layer may see the whole context (what expands
latents), only the tokens whose logits are wanted (a head), or an expert's share. One that is never
called is none of our business: PEFT would not adapt it either.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

Hook = Callable[[nn.Module, tuple[torch.Tensor, ...]], None]

BEFORE: Final = 2
NOW: Final = 3
"""Tokens of the call that is watched; ``BEFORE`` are in the cache by then, one gives logits."""


@torch.inference_mode()
def unfit(model: PreTrainedModel, cache_keyword: str, paths: Collection[str]) -> Sequence[str]:
    """Those of ``paths`` in ``model`` that cannot be adapted. ``cache_keyword``: of its forward.

    The model runs with Hugging Face's own attention and cache, and is left as it was.
    """
    seen: defaultdict[str, list[int]] = defaultdict(list)
    handles = [
        model.get_submodule(path).register_forward_pre_hook(_watch(seen[path]))
        for path in sorted(paths)
    ]
    attention = str(model.config._attn_implementation)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    model.set_attn_implementation("eager")
    try:
        cache = DynamicCache(config=model.config)
        for start, count in ((0, BEFORE), (BEFORE, NOW)):
            for rows in seen.values():
                rows.clear()
            _call(model, {cache_keyword: cache}, start, count)
    finally:
        model.set_attn_implementation(attention)
        for handle in handles:
            handle.remove()
    return [path for path, rows in seen.items() if set(rows) - {NOW}]


def _watch(rows: list[int]) -> Hook:
    def note(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        rows.append(inputs[0].shape[:-1].numel())

    return note


def _call(model: PreTrainedModel, cache: dict[str, Any], start: int, count: int) -> None:
    positions = torch.arange(start, start + count, device=model.device)[None]
    takes = inspect.signature(model.forward).parameters
    told = {"position_ids": positions} if "position_ids" in takes else {}
    # As the runner asks for logits: told by number, Gemma 4 leaves tokens out of its last layers.
    last = torch.tensor([count - 1], device=model.device)
    ids = torch.zeros_like(positions)
    model(input_ids=ids, use_cache=True, logits_to_keep=last, **cache, **told)

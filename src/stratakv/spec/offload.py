"""Which buffers may have their home on the host: those of which attention reads selected rows only.

Owns the cut of an anchor in two. The indexer scans its keys whole in every step, so they stay on
the device, as does whatever every query reads: DeepSeek-V4's coarse entries, its window and its
open blocks. Must not know sizes (``budget``).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from stratakv.core.ids import GroupId, LayerId
from stratakv.spec.groups import ANCHOR, BufferSpec, CacheSpec, Home
from stratakv.spec.kinds import BOUNDS, INDEX_KEY, KEY, LATENT, VALUE
from stratakv.spec.model_config import ModelConfig
from stratakv.spec.support import kind_of


def _latents(config: ModelConfig) -> str | None:
    return LATENT


def _indexed_entries(config: ModelConfig) -> str | None:
    """None where no layer has an indexer."""
    kind = "compressed_sparse_attention"
    if kind not in config.items("layer_types"):
        return None
    return f"c{config.section('compress_rates').integer(kind)}"


SELECTED: Final[Mapping[str, Callable[[ModelConfig], str | None]]] = {
    "deepseek_v32": _latents,
    "glm_moe_dsa": _latents,
    "deepseek_v4": _indexed_entries,
}
"""By model type: the kind of buffer of whose rows an indexer selects."""
SELECTED_GROUP: Final = "selected"


def selected_kind(config: Mapping[str, object]) -> str | None:
    """The kind of buffer that could be at home on the host; None where the model has none."""
    model = ModelConfig(config)
    kind_for = SELECTED.get(model.model_type)
    return None if kind_for is None else kind_for(model)


def top_k(config: Mapping[str, object]) -> int | None:
    """The most rows that a query of the model attends to in a layer with an indexer; None where
    the model has none that could be served from the host."""
    return None if selected_kind(config) is None else ModelConfig(config).integer("index_topk")


def indexers(spec: CacheSpec) -> int:
    """Layers that select rows themselves; the others read what one of these has selected."""
    names = (buffer for group in spec.groups for buffer in group.buffers)
    return len({
        layer
        for buffer in names
        if kind_of(buffer).endswith(INDEX_KEY) or _bounded(buffer)
        for layer in buffer.layers
    })  # fmt: skip


def offloaded(spec: CacheSpec, config: Mapping[str, object], home: Home = Home.HOST) -> CacheSpec:
    """The same cache with the selected buffers in a group of their own, whose ``home`` is the host,
    or the device where no request may leave any there. ``config``: of a model that has a
    ``top_k``."""
    kind = selected_kind(config)
    anchor = spec.groups[ANCHOR]
    chosen = tuple(buffer for buffer in anchor.buffers if kind_of(buffer) == kind)
    rest = tuple(buffer for buffer in anchor.buffers if kind_of(buffer) != kind)
    return _cut(spec, rest, chosen, home)


def has_pages_to_select(spec: CacheSpec) -> bool:
    """Whether its anchor has keys and values, and nothing else."""
    return {kind_of(buffer) for buffer in spec.groups[ANCHOR].buffers} == {KEY, VALUE}


def with_bounds(spec: CacheSpec, pages: int) -> CacheSpec:
    """The same cache of a model without an indexer, each of whose queries sees so many ``pages``:
    keys and values in a group of their own, at home on the host, beside bounds of each page, which
    stay. Bounds are named after ``pages``: what is computed with another number is another
    cache."""
    anchor = spec.groups[ANCHOR]
    bounds = tuple(
        replace(
            buffer,
            name=f"{BOUNDS}{pages}{buffer.name.removeprefix(KEY)}",
            rows_per_page=1,
            row_shape=(2, *buffer.row_shape),
        )
        for buffer in anchor.buffers
        if kind_of(buffer) == KEY
    )
    return _cut(spec, bounds, anchor.buffers, Home.HOST)


def _cut(
    spec: CacheSpec, rest: tuple[BufferSpec, ...], chosen: tuple[BufferSpec, ...], home: Home
) -> CacheSpec:
    anchor, *others = spec.groups
    selected = replace(anchor, id=GroupId(1), name=SELECTED_GROUP, buffers=chosen, home=home)
    moved = (replace(group, id=GroupId(group.id + 1)) for group in others)
    return replace(spec, groups=(replace(anchor, buffers=rest), selected, *moved))


def _bounded(buffer: BufferSpec) -> re.Match[str] | None:
    return re.fullmatch(rf"{BOUNDS}(\d+)", kind_of(buffer))


def bounds_pages(spec: CacheSpec) -> int:
    """Pages that a query sees where they are selected by bounds; 0 where they are not."""
    found = [match for b in spec.groups[ANCHOR].buffers if (match := _bounded(b))]
    return int(found[0][1]) if found else 0


def bounds_places(spec: CacheSpec) -> dict[LayerId, BufferSpec]:
    """The anchor's buffer with the bounds of each layer that has some."""
    of = spec.groups[ANCHOR].buffers
    return {layer: buffer for buffer in of if _bounded(buffer) for layer in buffer.layers}


def selected_group(spec: CacheSpec) -> GroupId:
    """The group of selected rows, wherever its home is; the anchor where they are not apart."""
    found = [group.id for group in spec.groups if group.name == SELECTED_GROUP]
    return found[0] if found else ANCHOR


def buffer_of(spec: CacheSpec, group: GroupId) -> dict[LayerId, BufferSpec]:
    """The buffer of each layer of a group whose layers have one each."""
    return {layer: buffer for buffer in spec.groups[group].buffers for layer in buffer.layers}

"""What of a spec the engine runs in this release, and where each layer's bytes lie.

Owns the refusal, worded once and with its reason. Deriving and planning know more kinds of
attention than the engine runs; must not derive anything itself.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, assert_never

from stratakv.core.ids import GroupId, LayerId
from stratakv.spec.derive import family_of
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.kinds import BOUNDS, CONV, INDEX_KEY, KEY, LATENT, RECURRENT, VALUE
from stratakv.spec.model_config import ModelConfig
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepChunk, KeepLive, KeepWindow
from stratakv.spec.time_steps import TimeSteps

ENTRIES: Final = r"c\d+(_index_k)?"
OVERLAP: Final = r"c\d+(_index)?_overlap"
OPEN_BLOCK: Final = r"c\d+(_index)?_open"
"""Names of compressed buffers, which only DeepSeek-V4 has: its own runner reads them."""
_NOT_YET: Final = "derived and planned for, but the engine does not run them yet"


@dataclass(frozen=True, slots=True)
class KeyValuePlace:
    """The group and the two buffers that hold one layer's keys and values."""

    group: GroupId
    key: BufferSpec
    value: BufferSpec


@dataclass(frozen=True, slots=True)
class LatentPlace:
    """The group and the buffer that hold one layer's latents, each with its rotary key behind."""

    group: GroupId
    latent: BufferSpec


@dataclass(frozen=True, slots=True)
class StatePlace:
    """The group and the buffers of one layer's state; a layer may have attention beside it.
    ``recurrent`` is None where the state is the convolution's and nothing else."""

    group: GroupId
    conv: BufferSpec
    recurrent: BufferSpec | None


def refusal(spec: CacheSpec) -> str | None:
    """Why the engine cannot serve this cache, or None where it can.

    It runs full, sliding and chunked attention over keys and values; latents in full and sliding
    attention, with index keys and compressed entries beside them; states; and blocks that are still
    open. A model's own module may refuse more (``engine.deepseek.refused``).
    """
    for group in spec.groups:
        reason = _group_refusal(group)
        if reason is not None:
            return reason
    return None


def continues_token_by_token(config: Mapping[str, object]) -> bool:
    """Whether Hugging Face's code of this model goes wrong when several tokens meet a state.

    config: ``to_dict()`` of the text configuration. ConfigError for an unknown model type.
    """
    return family_of(ModelConfig(config)).steps


def time_steps_of(config: Mapping[str, object]) -> TimeSteps | None:
    """Bounds of the model's time steps, or None where no time step can be outside.

    config: as above. ConfigError for a bound that is none, and for an unknown model type.
    """
    model = ModelConfig(config)
    steps = family_of(model).time_steps(model)
    return None if steps is None or not steps.bind else steps


def kind_of(buffer: BufferSpec) -> str:
    """The buffer's name without the number that distinguishes layers of several shapes."""
    return buffer.name.partition(".")[0]


def key_value_places(spec: CacheSpec) -> dict[LayerId, KeyValuePlace]:
    """Where every layer of key-value attention keeps its bytes; other layers are not in it."""
    places: dict[LayerId, KeyValuePlace] = {}
    for group in spec.groups:
        keys, values = _by_layer(group, KEY), _by_layer(group, VALUE)
        assert keys.keys() == values.keys(), f"group {group.name}: keys without values"
        assert not keys.keys() & places.keys(), f"group {group.name}: a layer in two groups"
        places |= {layer: KeyValuePlace(group.id, keys[layer], values[layer]) for layer in keys}
    return places


def latent_places(spec: CacheSpec) -> dict[LayerId, LatentPlace]:
    """Where every layer of latent attention keeps its bytes; other layers are not in it."""
    return {
        layer: LatentPlace(group.id, buffer)
        for group in spec.groups
        for layer, buffer in _by_layer(group, LATENT).items()
    }


def state_places(spec: CacheSpec) -> dict[LayerId, StatePlace]:
    """Where every layer with a state keeps it; other layers are not in it."""
    places: dict[LayerId, StatePlace] = {}
    for group in spec.groups:
        recurrent = _by_layer(group, RECURRENT)
        places |= {
            layer: StatePlace(group.id, conv, recurrent.get(layer))
            for layer, conv in _by_layer(group, CONV).items()
        }
    return places


def _by_layer(group: CacheGroup, kind: str) -> dict[LayerId, BufferSpec]:
    return {layer: b for b in group.buffers if kind_of(b) == kind for layer in b.layers}


def _group_refusal(group: CacheGroup) -> str | None:
    match group.retention:
        case KeepLive():
            known = OPEN_BLOCK
        case KeepBoundary():
            known = f"{CONV}|{RECURRENT}"
        case KeepAll():
            known = f"{KEY}|{VALUE}|{LATENT}|{INDEX_KEY}|{ENTRIES}|{BOUNDS}\\d+"
        case KeepWindow():
            known = f"{KEY}|{VALUE}|{LATENT}|{OVERLAP}"
        case KeepChunk():
            known = f"{KEY}|{VALUE}"
        case _:
            assert_never(group.retention)
    kinds = {kind_of(buffer) for buffer in group.buffers}
    others = sorted(kind for kind in kinds if not re.fullmatch(known, kind))
    if others:
        return f"buffers {', '.join(others)} of group {group.name} are {_NOT_YET}"
    return None

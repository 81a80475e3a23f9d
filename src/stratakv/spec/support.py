"""What of a spec the engine runs in this release, and where a layer's keys and values lie.

Owns the refusal, said once and with its reason. Deriving and planning know more kinds of attention
than the engine runs; must not derive anything itself.
"""

from dataclasses import dataclass
from typing import Final, assert_never

from stratakv.core.ids import GroupId, LayerId
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.kinds import KEY, LATENT, VALUE
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepChunk, KeepLive, KeepWindow

_NOT_YET: Final = "derived and planned for, but the engine does not run them yet"


@dataclass(frozen=True, slots=True)
class KeyValuePlace:
    """The group and the two buffers that hold one layer's keys and values."""

    group: GroupId
    key: BufferSpec
    value: BufferSpec


def refusal(spec: CacheSpec) -> str | None:
    """Why the engine cannot serve this cache, or None where it can.

    It runs groups of full, sliding and chunked attention whose bytes are keys and values.
    """
    for group in spec.groups:
        reason = _group_refusal(group)
        if reason is not None:
            return reason
    return None


def kind_of(buffer: BufferSpec) -> str:
    """The buffer's name without the number that tells layers of several shapes apart."""
    return buffer.name.partition(".")[0]


def key_value_places(spec: CacheSpec) -> dict[LayerId, KeyValuePlace]:
    """Where every layer of key-value attention keeps its bytes; other layers are not in it."""
    places: dict[LayerId, KeyValuePlace] = {}
    for group in spec.groups:
        keys = {layer: b for b in group.buffers if kind_of(b) == KEY for layer in b.layers}
        values = {layer: b for b in group.buffers if kind_of(b) == VALUE for layer in b.layers}
        assert keys.keys() == values.keys(), f"group {group.name}: keys without values"
        assert not keys.keys() & places.keys(), f"group {group.name}: a layer in two groups"
        places |= {layer: KeyValuePlace(group.id, keys[layer], values[layer]) for layer in keys}
    return places


def _group_refusal(group: CacheGroup) -> str | None:
    match group.retention:
        case KeepBoundary():
            return f"state groups ({group.name}) are {_NOT_YET}"
        case KeepLive():
            return f"request-scoped groups ({group.name}) are {_NOT_YET}"
        case KeepAll() | KeepWindow() | KeepChunk():
            kinds = {kind_of(buffer) for buffer in group.buffers} - {KEY, VALUE}
        case _:
            assert_never(group.retention)
    if LATENT in kinds:
        return f"latent attention ({group.name}: {LATENT}) groups are {_NOT_YET}"
    if kinds:
        return f"sparse and compressed buffers ({', '.join(sorted(kinds))}) are {_NOT_YET}"
    return None

"""Rows that are not elements of one dtype: eight-bit values, their scales, and rotary parts in 16.

Owns the description of DeepSeek's FP8 rows, as plain data, and puts them into a spec in place of
the plain rows. The engine runs plain rows; must not encode a row, nor decide who wants which.

Source: the rows of DeepSeek's own kernels for V3.2 (656 and 132 bytes) and V4 (584 and 132).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from stratakv.core.errors import ConfigError
from stratakv.spec.groups import DTYPE_BYTES, BufferSpec, CacheSpec
from stratakv.spec.kinds import INDEX_KEY, LATENT
from stratakv.spec.model_config import ModelConfig

FP8: Final = "float8_e4m3fn"
ROTARY: Final = "bfloat16"
POWER_OF_TWO: Final = "float8_e8m0fnu"
LATENT_TILE: Final = 128
"""Values that share one scale: V3.2's latents, and the index keys of both."""
V4_TILE: Final = 64
FIELD_BYTES: Final = {**DTYPE_BYTES, POWER_OF_TWO: 1}


@dataclass(frozen=True, slots=True)
class RowField:
    """``name``: values, scales, rope or padding."""

    name: str
    elements: int
    dtype: str

    @property
    def bytes(self) -> int:
        return self.elements * FIELD_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """One row, field after field."""

    fields: tuple[RowField, ...]

    @property
    def row_bytes(self) -> int:
        return sum(field.bytes for field in self.fields)


def latent_row(rank: int, rope_dim: int) -> RowFormat:
    """V3.2: the latent in tiles with a scale of 32 bits each, then the rotary key as it is."""
    scales = RowField("scales", -(-rank // LATENT_TILE), "float32")
    rope = RowField("rope", rope_dim, ROTARY)
    return RowFormat((RowField("values", rank, FP8), scales, rope))


def shared_latent_row(dim: int, rope_dim: int) -> RowFormat:
    """V4: of ``dim`` the last ``rope_dim`` are rotary; scales are powers of two, and a row ends at
    a multiple of 8 bytes."""
    values = RowField("values", dim - rope_dim, FP8)
    rope = RowField("rope", rope_dim, ROTARY)
    scales = RowField("scales", -(-(dim - rope_dim) // V4_TILE), POWER_OF_TWO)
    padding = -(values.bytes + rope.bytes + scales.bytes) % 8
    fields = (values, rope, scales)
    return RowFormat((*fields, RowField("padding", padding, "uint8")) if padding else fields)


def index_key_row(dim: int) -> RowFormat:
    scales = RowField("scales", -(-dim // LATENT_TILE), "float32")
    return RowFormat((RowField("values", dim, FP8), scales))


def fp8_rows(spec: CacheSpec, config: Mapping[str, object]) -> dict[str, RowFormat]:
    """The format of every buffer that has one, by its name; states stay what they are.

    config: as for ``spec_of``. ConfigError where no buffer of the model has one.
    """
    found: dict[str, RowFormat] = {}
    model = ModelConfig(config)
    for buffer in (buffer for group in spec.groups for buffer in group.buffers):
        name = buffer.name.partition(".")[0]
        if name.endswith(INDEX_KEY):
            found[buffer.name] = index_key_row(buffer.row_shape[0])
        elif name == LATENT and model.has("kv_lora_rank"):
            rope_dim = model.integer("qk_rope_head_dim")
            found[buffer.name] = latent_row(buffer.row_shape[0] - rope_dim, rope_dim)
        elif name == LATENT or (name[:1] == "c" and name[1:].isdecimal()):
            rope_dim = model.integer("qk_rope_head_dim")
            found[buffer.name] = shared_latent_row(buffer.row_shape[0], rope_dim)
    if not found:
        raise ConfigError(
            "--rows fp8: described are rows of latents and of index keys, of which model type "
            f"{model.model_type!r} has none; allowed is plain"
        )
    return found


def in_rows(spec: CacheSpec, formats: Mapping[str, RowFormat]) -> CacheSpec:
    """``spec`` with the bytes of ``formats`` in place of plain rows."""

    def formatted(buffer: BufferSpec) -> BufferSpec:
        row = formats.get(buffer.name)
        if row is None:
            return buffer
        return replace(buffer, row_shape=(row.row_bytes,), dtype="uint8")

    groups = tuple(
        replace(group, buffers=tuple(formatted(buffer) for buffer in group.buffers))
        for group in spec.groups
    )
    return replace(spec, groups=groups)

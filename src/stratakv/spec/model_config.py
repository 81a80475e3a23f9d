"""Reads a model's configuration. Owns the difference between absent, null and wrong, and how long a
sequence may get before its earlier keys would have to change; must not know what a field means
(``families``), nor import the library that wrote it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from stratakv.core.errors import ConfigError
from stratakv.core.ids import LayerId


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The text part of a Hugging Face configuration, as its ``to_dict()`` gives it.

    A field that is null counts as absent. Every getter raises ConfigError, naming the model type
    and the field, where a field is missing without a default or has another type.
    """

    fields: Mapping[str, object]

    @property
    def model_type(self) -> str:
        return self.text("model_type")

    def has(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise self.fault(name, "a string")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fault(name, "an integer")
        return value

    def items(self, name: str) -> tuple[object, ...]:
        """A list field."""
        value = self.fields.get(name)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.fault(name, "a list")
        return tuple(cast("Sequence[object]", value))

    def section(self, name: str) -> "ModelConfig":
        """A dict field as a configuration of its own; empty where it is absent."""
        value = self.fields.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.fault(name, "a dict")
        fields = cast("Mapping[object, object]", value)
        return ModelConfig({str(key): item for key, item in fields.items()})

    def layer(self, layer: LayerId) -> "ModelConfig":
        """This configuration with ``per_layer_config`` of one layer laid over it.

        Hugging Face writes the layer's number as a string, padded with zeros or not.
        """
        overrides = self.section("per_layer_config")
        for key in overrides.fields:
            if key.isdecimal() and int(key) == layer:
                return ModelConfig({**self.fields, **overrides.section(key).fields})
        return self

    def fault(self, name: str, wanted: str) -> ConfigError:
        """What to raise about one field."""
        model_type = self.fields.get("model_type")
        value = self.fields.get(name)
        return ConfigError(f"model type {model_type!r}: {name} must be {wanted}, got {value!r}")


def stable_positions(config: Mapping[str, object]) -> int | None:
    """Tokens up to which a key depends on its own position alone; None where that is always so.

    config: ``to_dict()`` of the text configuration. "longrope" turns keys by other angles as soon
    as any position of a call is past the original training length: keys that are cached already,
    and those of other requests in the same call, do not follow. ("dynamic" does so past
    ``max_position_embeddings``, which is the limit anyway.) PhiMoE's own code scales keys by
    another factor past that length whatever the type, unless it is "default".
    """
    moe = config.get("model_type") == "phimoe"
    rope = ModelConfig(config).section("rope_parameters")
    layers = [rope.section(n) for n, value in rope.fields.items() if isinstance(value, Mapping)]
    limits = [
        section.integer("original_max_position_embeddings")
        for section in (rope, *layers)
        if section.fields.get("rope_type") == "longrope"
        or (moe and section.fields.get("rope_type", "default") != "default")
    ]
    return min(limits, default=None)

"""Questions that both families' configurations are asked before anything is built.

Owns the wording of the answers. Must not know a field of one family, nor load anything.
"""

from collections.abc import Collection

from stratakv.spec.model_config import ModelConfig


def number(config: ModelConfig, name: str) -> float:
    """ConfigError for what is none."""
    value = config.fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise config.fault(name, "a number")
    return float(value)


def positive(config: ModelConfig, name: str) -> int:
    """ConfigError for what is no integer from 1 up."""
    value = config.integer(name)
    if value < 1:
        raise config.fault(name, "at least 1")
    return value


def bounded(config: ModelConfig, name: str, most: int, meaning: str) -> None:
    """ConfigError for what is not in 1 .. ``most``, which is ``meaning``."""
    if positive(config, name) > most:
        raise config.fault(name, f"at most {most}, {meaning}")


def of_every_layer(config: ModelConfig, name: str, known: Collection[str]) -> tuple[str, ...]:
    """A list with one of ``known`` for each layer; ConfigError for anything else. It may be longer:
    layers that predict further tokens come last, and are not run."""
    names = tuple(str(item) for item in config.items(name))
    layers = config.integer("num_hidden_layers")
    if len(names) < layers or not set(names) <= set(known):
        allowed = " or ".join(repr(item) for item in known)
        raise config.fault(name, f"{allowed} for each of {layers} layers")
    return names[:layers]


def refuse_unlike_layers(config: ModelConfig) -> None:
    """ConfigError where single layers have sizes of their own, or another layer's cache."""
    if config.section("per_layer_config").fields:
        raise config.fault("per_layer_config", "absent")
    if config.integer("num_kv_shared_layers", 0):
        raise config.fault("num_kv_shared_layers", "absent")

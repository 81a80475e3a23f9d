"""How long a sequence may get before its earlier keys would have to change.

Owns that limit. Must not know what a family caches (``families``).
"""

from collections.abc import Mapping

from stratakv.spec.model_config import ModelConfig


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

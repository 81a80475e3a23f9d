"""A field of a configuration is there, absent (or null), or wrong; what is wrong is named."""

import pytest

from stratakv.core.errors import ConfigError
from stratakv.core.ids import LayerId
from stratakv.spec.model_config import ModelConfig

CONFIG = ModelConfig(
    {
        "model_type": "llama", "heads": 8, "none": None, "flag": True, "rate": 0.5,
        "types": ["full", "sliding"], "pair": (1, 2), "rope": {"theta": 1e4, 7: "seven"},
    }
)  # fmt: skip


def test_fields_are_read_by_their_type() -> None:
    assert CONFIG.model_type == CONFIG.text("model_type") == "llama"
    assert CONFIG.integer("heads") == 8
    assert CONFIG.items("types") == ("full", "sliding")
    assert CONFIG.items("pair") == (1, 2)
    assert CONFIG.section("rope").fields == {"theta": 1e4, "7": "seven"}


def test_a_null_field_is_absent() -> None:
    assert [CONFIG.has(name) for name in ("heads", "flag", "none", "nothing")] == [
        True, True, False, False,
    ]  # fmt: skip
    for name in ("none", "nothing"):
        assert CONFIG.integer(name, 3) == 3
        assert CONFIG.integer(name, 0) == 0
        assert CONFIG.section(name).fields == {}
    assert CONFIG.integer("heads", 3) == 8


WRONG = [
    ("text", "heads", "heads must be a string, got 8"),
    ("text", "nothing", "nothing must be a string, got None"),
    ("integer", "nothing", "nothing must be an integer, got None"),
    ("integer", "rate", "rate must be an integer, got 0.5"),
    ("integer", "flag", "flag must be an integer, got True"),
    ("items", "none", "none must be a list, got None"),
    ("items", "model_type", "model_type must be a list, got 'llama'"),
    ("section", "types", r"types must be a dict, got \['full', 'sliding'\]"),
]


@pytest.mark.parametrize(("getter", "name", "words"), WRONG)
def test_what_is_wrong_is_named_with_the_model_type_and_the_field(
    getter: str, name: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"^model type 'llama': {words}$"):
        getattr(CONFIG, getter)(name)


def test_a_default_excuses_nobody_who_is_there_and_wrong() -> None:
    with pytest.raises(ConfigError, match="rate must be an integer"):
        CONFIG.integer("rate", 4)


@pytest.mark.parametrize("key", ["3", "03", "003"])
def test_one_layer_has_its_own_fields_over_those_of_all(key: str) -> None:
    own = {key: {"heads": 2, "window": 64}, "4": {"heads": 1}, "x": {"heads": 5}}
    config = ModelConfig({**CONFIG.fields, "per_layer_config": own})
    third = config.layer(LayerId(3))
    assert (third.integer("heads"), third.integer("window"), third.model_type) == (2, 64, "llama")
    assert config.layer(LayerId(4)).integer("heads") == 1
    assert config.layer(LayerId(5)) is config
    assert CONFIG.layer(LayerId(3)) is CONFIG

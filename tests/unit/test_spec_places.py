"""Where each layer's bytes lie: found by the buffers' names, whatever group they are in."""

import pytest

from stratakv.core.errors import ConfigError
from stratakv.core.ids import GroupId, LayerId
from stratakv.spec.compressed import BlockPlace, BufferPlace, CompressedPlaces, compressed_places
from stratakv.spec.derive import spec_of
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepLive, KeepWindow, Retention
from stratakv.spec.support import (
    KeyValuePlace,
    LatentPlace,
    StatePlace,
    continues_token_by_token,
    key_value_places,
    latent_places,
    state_places,
)
from tests.unit.test_spec_derive import LLAMA, V4


def buffer(name: str, *layers: int, row: int = 4) -> BufferSpec:
    return BufferSpec(
        name=name, layers=tuple(LayerId(n) for n in layers), rows_per_page=16, row_shape=(row,),
        dtype="uint8",
    )  # fmt: skip


def spec_with(*groups: tuple[Retention, tuple[BufferSpec, ...]]) -> CacheSpec:
    return CacheSpec(
        page_tokens=16,
        groups=tuple(
            CacheGroup(id=GroupId(i), name=f"g{i}", retention=rule, buffers=buffers)
            for i, (rule, buffers) in enumerate(groups)
        ),
    )


KEYS, VALUES = buffer("k", 0, 3), buffer("v", 0, 3)
WIDE_KEYS, WIDE_VALUES = buffer("k.1", 5, row=8), buffer("v.1", 5, row=8)
LATENT, INDEX = buffer("latent", 1, row=9), buffer("index_k", 1)
LOCAL = buffer("latent", 2, row=7)
CONV, RECURRENT = buffer("conv", 4, 5), buffer("recurrent", 5)
ODD_CONV, ODD_RECURRENT = buffer("conv.1", 6, row=8), buffer("recurrent.1", 6, row=8)
MIXED = spec_with(
    (KeepAll(), (KEYS, VALUES, LATENT, INDEX)),
    (KeepWindow(40), (WIDE_KEYS, WIDE_VALUES, LOCAL)),
    (KeepBoundary(), (CONV, RECURRENT, ODD_CONV, ODD_RECURRENT)),
    (KeepLive(), (buffer("c4_open", 2),)),
)


def test_keys_and_values_of_a_layer_lie_in_one_group() -> None:
    assert key_value_places(MIXED) == {
        LayerId(0): KeyValuePlace(GroupId(0), KEYS, VALUES),
        LayerId(3): KeyValuePlace(GroupId(0), KEYS, VALUES),
        LayerId(5): KeyValuePlace(GroupId(1), WIDE_KEYS, WIDE_VALUES),
    }


def test_latents_of_every_group_are_found() -> None:
    assert latent_places(MIXED) == {
        LayerId(1): LatentPlace(GroupId(0), LATENT),
        LayerId(2): LatentPlace(GroupId(1), LOCAL),
    }


def test_a_state_may_be_a_convolution_alone() -> None:
    assert state_places(MIXED) == {
        LayerId(4): StatePlace(GroupId(2), CONV, None),
        LayerId(5): StatePlace(GroupId(2), CONV, RECURRENT),
        LayerId(6): StatePlace(GroupId(2), ODD_CONV, ODD_RECURRENT),
    }


def test_keys_without_values_and_layers_in_two_groups_are_no_spec() -> None:
    with pytest.raises(AssertionError, match="keys without values"):
        key_value_places(spec_with((KeepAll(), (KEYS,))))
    with pytest.raises(AssertionError, match="a layer in two groups"):
        key_value_places(spec_with((KeepAll(), (KEYS, VALUES)), (KeepWindow(8), (KEYS, VALUES))))


def test_each_layer_of_deepseek_v4_has_its_window_what_it_compresses_and_its_indexer() -> None:
    spec = spec_of(V4, page_tokens=256, dtype="bfloat16")
    at = {b.name: BufferPlace(group.id, b) for group in spec.groups for b in group.buffers}
    assert {name: place.group for name, place in at.items()} == {
        "c4": 0, "c4_index_k": 0, "c128": 0,
        "latent": 1, "c4_overlap": 1, "c4_index_overlap": 1,
        "c4_open": 2, "c4_index_open": 2, "c128_open": 2,
    }  # fmt: skip
    found = compressed_places(spec)
    sparse = BlockPlace(4, at["c4"], at["c4_open"], at["c4_overlap"])
    index = BlockPlace(4, at["c4_index_k"], at["c4_index_open"], at["c4_index_overlap"])
    heavy = BlockPlace(128, at["c128"], at["c128_open"], None)
    assert found == {
        LayerId(0): CompressedPlaces(at["latent"], None, None),
        LayerId(1): CompressedPlaces(at["latent"], sparse, index),
        LayerId(2): CompressedPlaces(at["latent"], heavy, None),
    }
    assert {type(place.blocks.ratio) for place in found.values() if place.blocks} == {int}


def test_a_model_without_latents_compresses_nothing() -> None:
    assert compressed_places(spec_of(LLAMA, page_tokens=16, dtype="bfloat16")) == {}


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "zamba", "jamba"])
def test_states_of_the_first_mamba_are_continued_one_token_at_a_time(family: str) -> None:
    assert continues_token_by_token({"model_type": family})


@pytest.mark.parametrize("family", ["mamba2", "bamba", "zamba2", "qwen3_next", "lfm2", "llama"])
def test_other_models_meet_several_tokens_at_once(family: str) -> None:
    assert not continues_token_by_token({"model_type": family})


def test_how_an_unknown_model_continues_is_not_guessed() -> None:
    with pytest.raises(ConfigError, match="'rwkv' is not known"):
        continues_token_by_token({"model_type": "rwkv"})

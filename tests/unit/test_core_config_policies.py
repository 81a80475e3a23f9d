"""Policies are chosen by name, and a flag that would do nothing is refused."""

import pytest

from stratakv.core.choices import EVICTIONS, WRITE_POLICIES
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError


@pytest.mark.parametrize("name", EVICTIONS)
def test_every_eviction_policy_is_allowed_with_every_cache(name):
    for cache in ("off", "device", "host"):
        assert EngineConfig(eviction=name, cache=cache).eviction == name


@pytest.mark.parametrize("name", WRITE_POLICIES)
def test_every_write_policy_is_allowed_with_a_host(name):
    assert EngineConfig(write_policy=name).write_policy == name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eviction": "mru"}, "--eviction mru: allowed are lru, lfu, slru, s3-fifo, priority"),
        ({"write_policy": "back"}, "--write-policy back: allowed are write-through, "),
        ({"write_policy": "write-back", "cache": "device"}, "allowed with --cache host"),
        ({"write_policy": "write-through-selective", "cache": "off"}, "allowed with --cache host"),
        ({"dtype": "int8"}, "--dtype int8: allowed are float32, bfloat16, float16, auto"),
        ({"host_ratio": -0.5}, "--host-ratio -0.5: allowed are finite numbers from 0 up"),
        ({"host_ratio": float("inf")}, "--host-ratio inf: allowed are finite numbers from 0 up"),
        ({"host_memory": "4GiB", "host_ratio": 2.0}, "--host-memory 4GiB and --host-ratio 2 both"),
        ({"write_hits": 0}, "--write-hits 0: allowed is 1 and more"),
        ({"write_hits": 3}, "--write-hits: allowed with --write-policy write-through-selective"),
        ({"write_back_reserve": 0.0}, "--write-back-reserve 0.0: allowed is above 0"),
        ({"write_back_reserve": float("nan")}, "--write-back-reserve nan: allowed is above 0"),
        (
            {"write_back_reserve": 0.2, "write_policy": "write-through-selective"},
            "--write-back-reserve: allowed with --write-policy write-back",
        ),
    ],
)
def test_what_is_refused_names_the_flag_and_what_is_allowed(fields, message):
    with pytest.raises(ConfigError) as error:
        EngineConfig(**fields)
    assert message in str(error.value)

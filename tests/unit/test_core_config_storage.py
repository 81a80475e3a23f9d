"""The flags of the storage tier: each is refused where it would do nothing or cannot be."""

import pytest

from stratakv.core.choices import PREFETCH_POLICIES
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError


@pytest.mark.parametrize("name", PREFETCH_POLICIES)
def test_prefetch_flags_are_allowed_before_storage_is_attached(name):
    for storage in (None, "memory://"):
        config = EngineConfig(
            prefetch_policy=name, prefetch_threshold=1, prefetch_share=1.0, storage=storage
        )
        assert config.prefetch_policy == name


def test_the_timeouts_go_with_their_policy():
    config = EngineConfig(prefetch_timeout=0.0, prefetch_timeout_per_1k=60.0)
    assert (config.prefetch_timeout, config.prefetch_timeout_per_1k) == (0, 60)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefetch_policy": "hope"}, "--prefetch-policy hope: allowed are best-effort, wait-"),
        ({"prefetch_threshold": 0}, "--prefetch-threshold 0: allowed is 1 and more"),
        ({"prefetch_share": 0.0}, "--prefetch-share 0.0: allowed is above 0, and 1 at most"),
        ({"prefetch_share": 1.1}, "--prefetch-share 1.1: allowed is above 0, and 1 at most"),
        ({"prefetch_share": float("nan")}, "--prefetch-share nan: allowed is above 0"),
        ({"prefetch_timeout": -1.0}, "--prefetch-timeout -1.0: allowed are finite seconds"),
        ({"prefetch_timeout": float("inf")}, "--prefetch-timeout inf: allowed are finite seconds"),
        ({"prefetch_timeout": float("nan")}, "--prefetch-timeout nan: allowed are finite seconds"),
        ({"prefetch_timeout_per_1k": -1.0}, "--prefetch-timeout-per-1k -1.0: allowed are finite"),
        (
            {"prefetch_timeout": 2.0, "prefetch_policy": "best-effort"},
            "--prefetch-timeout: allowed with --prefetch-policy timeout",
        ),
        (
            {"prefetch_timeout_per_1k": 2.0, "prefetch_policy": "wait-complete"},
            "--prefetch-timeout-per-1k: allowed with --prefetch-policy timeout",
        ),
    ],
)
def test_what_is_refused_names_the_flag_and_what_is_allowed(fields, message):
    with pytest.raises(ConfigError) as error:
        EngineConfig(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("storage", "memory://"),
        ("storage_root", ("/",)),
        ("storage_key_file", "/key"),
        ("prefetch_policy", "best-effort"),
        ("prefetch_threshold", 300),
        ("prefetch_share", 0.25),
        ("prefetch_timeout", 2.0),
        ("prefetch_timeout_per_1k", 2.0),
    ],
)
def test_without_a_host_tier_there_is_no_storage(name, value):
    for cache in ("off", "device"):
        with pytest.raises(ConfigError) as error:
            EngineConfig(cache=cache, **{name: value})
        flag = f"--{name.replace('_', '-')}"
        assert str(error.value).startswith(f"{flag}: with --cache {cache}")
        assert str(error.value).endswith("allowed with --cache host")


@pytest.mark.parametrize(("api_key", "admin_key"), [(None, ""), ("same", "same")])
def test_an_admin_key_is_a_key_of_its_own_and_does_not_show(api_key, admin_key):
    with pytest.raises(ConfigError, match="--admin-key: allowed is a key") as error:
        ServerConfig(api_key=api_key, admin_key=admin_key)
    assert "same" not in str(error.value)

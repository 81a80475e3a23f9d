import pytest

from stratakv.core.config import EngineConfig
from stratakv.core.device_memory import DeviceBudget, MemoryBytes, MemoryShare, device_memory_of
from stratakv.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("0.85", MemoryShare(0.85)), (".5", MemoryShare(0.5)), ("1.0", MemoryShare(1.0)),
        (" 0.1 ", MemoryShare(0.1)), ("1", MemoryBytes(1)), ("80GiB", MemoryBytes(80 << 30)),
        ("0.5G", MemoryBytes(1 << 29)), ("0", MemoryBytes(0)),
    ],
)  # fmt: skip
def test_a_number_with_a_point_and_no_unit_is_a_share(text, memory):
    assert device_memory_of(text, "cuda") == memory


@pytest.mark.parametrize(
    ("text", "device", "message"),
    [
        ("0.85", "cpu", r"^--device-memory 0\.85: a share is of a GPU's free memory, .* allowed"),
        (
            "1.5",
            "cuda",
            r"^--device-memory 1\.5: .* allowed is above 0, and 1 at most, or a number",
        ),
        ("0.0", "cuda", r"^--device-memory 0\.0: .* allowed is above 0"),
        ("85%", "cuda", r"^--device-memory 85%: allowed is a number of bytes"),
        ("-0.5", "cuda", r"^--device-memory -0\.5: allowed is"),
    ],
)
def test_what_is_neither_a_share_nor_bytes_is_refused(text, device, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(device=device, device_memory=text)


def test_each_device_has_its_default():
    assert EngineConfig().device_tier == MemoryBytes(2 << 30)
    assert EngineConfig(device="cuda").device_tier == MemoryShare(0.85)
    assert EngineConfig(device="cuda", device_memory="4GiB").device_tier == MemoryBytes(4 << 30)


def test_a_share_is_of_what_is_free_and_says_so():
    assert DeviceBudget.of(MemoryShare(0.5), "0.5", 3 << 30) == DeviceBudget(
        3 << 29, "0.5 of 3 GiB"
    )
    assert DeviceBudget.of(MemoryBytes(100), "100B", 3 << 30) == DeviceBudget(100, "100B")


def test_an_unknown_device_is_refused():
    with pytest.raises(ConfigError, match=r"^--device tpu: allowed are cpu, cuda$"):
        EngineConfig(device="tpu")

import pytest

from stratakv.core.errors import ConfigError
from stratakv.core.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1073741824", 2**30), ("0", 0), ("512B", 512), ("64GiB", 64 * 2**30), ("512MiB", 2**29),
        ("1.5G", 3 * 2**29), ("1.5gib", 3 * 2**29), (" 2 TiB ", 2**41), ("10KB", 10_000),
        ("3GB", 3 * 10**9), ("0.3K", 307), ("9007199254740993", 2**53 + 1),
    ],
)  # fmt: skip
def test_quantities_are_read(text: str, size_bytes: int) -> None:
    assert parse_bytes(text, "--device-memory") == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1.5.2G", "12 parsecs", "1e9", "1,5G", "٣G"])
def test_what_is_no_quantity_is_refused_naming_the_flag_and_the_units(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--host-memory.*GiB.*powers of 1024.*powers of 1000"):
        parse_bytes(text, "--host-memory")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 * 2**29, "1.50 GiB"), (2**46, "64 TiB")],
)
def test_sizes_are_written_in_the_largest_unit(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize("size_bytes", [1, 4097, 10**7, 123_456_789_012, 2**50 + 1])
def test_what_is_written_can_be_read_back_to_within_a_hundredth(size_bytes: int) -> None:
    again = parse_bytes(format_bytes(size_bytes), "--device-memory")
    assert abs(again - size_bytes) <= size_bytes / 100

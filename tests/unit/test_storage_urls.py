from pathlib import Path

import pytest

from stratakv.core.errors import ConfigError
from stratakv.storage.urls import (
    FileUrl,
    MemoryUrl,
    MooncakeOptions,
    PluginUrl,
    RedisOptions,
    S3Options,
    StorageUrl,
    hidden,
    parse_storage_url,
)


@pytest.mark.parametrize(
    ("text", "record"),
    [
        ("memory://", MemoryUrl(quota_bytes=1 << 30)),
        ("memory://?quota=2MiB", MemoryUrl(quota_bytes=2 << 20)),
        (
            "file:///var/lib/stratakv?quota=200GiB&ttl=7d&sync=power",
            FileUrl(
                directory=Path("/var/lib/stratakv"), quota_bytes=200 << 30, ttl_s=604_800.0,
                power_safe=True,
            ),
        ),
        (
            "file://localhost/a%20b?ttl=1.5h",
            FileUrl(directory=Path("/a b"), quota_bytes=64 << 30, ttl_s=5400.0, power_safe=False),
        ),
        ("redis://h", RedisOptions(url="redis://h", ttl_s=None)),
        ("rediss://u:p@h:1/2?ttl=30", RedisOptions(url="rediss://u:p@h:1/2", ttl_s=30.0)),
        ("redis+unix:///run/r.sock", RedisOptions(url="unix:///run/r.sock", ttl_s=None)),
        ("s3://b", S3Options(bucket="b", prefix="")),
        (
            "s3://b/p/q/?endpoint=http://h:9000&region=eu-west-1",
            S3Options(
                bucket="b", prefix="p/q",
                settings={"endpoint": "http://h:9000", "region": "eu-west-1"},
            ),
        ),
        (
            "mooncake://h:50051?protocol=rdma&segment=4GiB&timeout=2s&metadata=http://h:8080/metadata",
            MooncakeOptions(
                master=("h", 50051), metadata="http://h:8080/metadata", transport="rdma",
                segment_bytes=4 << 30, timeout_s=2.0,
            ),
        ),
    ],
)  # fmt: skip
def test_urls_are_read(text: str, record: StorageUrl):
    assert parse_storage_url(text) == record


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("/var/lib/stratakv", "memory://, file://, redis://"),
        ("nfs://host/x", "memory://, file://, redis://"),
        ("file:/x", "file://"),
        ("file://host/x", "three slashes"),
        ("file:///", "three slashes"),
        ("file:///a%00b", "no NUL"),
        ("file:///a\udc00\ud800", "file system"),
        ("redis+unix:///run/a%00b", "no NUL"),
        ("file:///x?quota=lots", "quota.*GiB"),
        ("file:///x?quota=0", "more than 0"),
        ("file:///x?ttl=0", "ttl.*above 0"),
        ("file:///x?ttl=7y", "s, m, h, d or w"),
        ("file:///x?sync=disk", "process, power"),
        ("file:///x?quoat=1GiB", "quoat is no option.*quota, ttl, sync"),
        ("file:///x?ttl=1d&ttl=2d", "given twice"),
        ("file:///x?ttl", "NAME=VALUE"),
        ("file:///x#y", "#"),
        ("memory://host", r"memory://\?quota"),
        ("redis:///0", "HOST"),
        ("redis://h/zero", "NUMBER"),
        ("redis://h:99999", "URL|port"),
        ("redis+unix://h/x", "socket"),
        ("s3://key:secret@b", "environment"),
        ("s3://b?endpoint=h:9000", "http"),
        ("mooncake://h", "HOST:PORT"),
        ("mooncake://h:1?protocol=ucx", "tcp, rdma"),
        ("http://[", "no URL"),
    ],
)
def test_what_is_not_allowed_is_refused_naming_the_flag_and_what_is(text: str, allowed: str):
    with pytest.raises(ConfigError, match=f"--storage.*(?:{allowed})"):
        parse_storage_url(text)


def test_an_installed_scheme_is_passed_on():
    assert parse_storage_url("tape://7?x=1", ["tape"]) == PluginUrl(
        scheme="tape", url="tape://7?x=1"
    )
    with pytest.raises(ConfigError, match="tape://"):
        parse_storage_url("disk://7", ["tape"])


def test_a_password_never_shows():
    with pytest.raises(ConfigError) as caught:
        parse_storage_url("redis://user:secret@h/x")
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(parse_storage_url("redis://user:secret@h"))
    assert hidden("redis://:secret@h") == "redis://:***@h"
    assert hidden("redis://u:sec@ret/@h:1/0") == "redis://u:***@h:1/0"
    assert hidden("s3://b/p?endpoint=http://u:secret@h") == "s3://b/p?endpoint=http://u:***@h"
    assert hidden("redis://h:6379/0?ttl=7d") == "redis://h:6379/0?ttl=7d"


@pytest.mark.parametrize(
    "secret",
    ["pa/ss", "pa?ss", "pa#ss", "pa[ss", "pa]ss", "12?pass=1", "12?pa=1&pa=2", "pa\u2100ss"],
)
@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+unix", "mooncake", "file", "tape"])
def test_no_piece_of_a_password_is_echoed(scheme: str, secret: str):
    with pytest.raises(ConfigError) as caught:
        parse_storage_url(f"{scheme}://user:{secret}@host/")
    message = str(caught.value)
    assert f"{scheme}://user:***@host/" in message
    assert "pa" not in message.replace("PATH", "").replace("path", "").replace("password", "")

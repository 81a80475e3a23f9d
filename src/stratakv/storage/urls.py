"""``--storage URL``, read once into a record. Owns the URL forms and their options, and which
directories a URL that came over the network may name: who has the admin key must not thereby choose
where in the file system the server writes. Must not open or make anything.

    memory://?quota=1GiB
    file:///var/lib/stratakv?quota=200GiB&ttl=7d&sync=power
    redis://user:password@host:6379/0?ttl=7d&timeout=10s    also rediss:// and redis+unix:///socket
    s3://bucket/prefix?endpoint=http://host:9000&region=eu-west-1
    mooncake://master:50051?metadata=http://host:8080/metadata&protocol=tcp&segment=4GiB&timeout=10s
"""

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from stratakv.core.choices import given
from stratakv.core.errors import ConfigError
from stratakv.core.units import ALLOWED, bytes_of

FLAG: Final = "--storage"
DEFAULT_QUOTA: Final = "64GiB"
TIMEOUT_S: Final = 10.0
"""Of one batch or request of a remote store."""
SYNCS: Final = ("process", "power")
PROTOCOLS: Final = ("tcp", "rdma")
_REDIS: Final = ("redis", "rediss", "redis+unix")
_SCHEMES: Final = ("memory", "file", *_REDIS, "s3", "mooncake")
_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUrl:
    quota_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileUrl:
    """``power_safe``: what was stored survives a power loss too, not only this process's death."""

    directory: Path
    quota_bytes: int
    ttl_s: float | None
    power_safe: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """``url``: without options, redis-py's, with ``redis``, ``rediss`` or ``unix``; it may hold a
    password.

    ``timeout_s`` bounds one batch, ``connect_timeout_s`` a connection. ``ttl_s`` counts from the
    last use; None: forever. ``batch_bytes`` bounds what is under way at once. ``login`` has what
    redis-py takes beside the URL.
    """

    url: str = field(repr=False)
    login: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    prefix: str = "stratakv"
    ttl_s: float | None = None
    timeout_s: float = TIMEOUT_S
    connect_timeout_s: float = 3.0
    batch_bytes: int = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """``settings``: obstore's ``S3Config`` (endpoint, region, credentials); what it has not, the
    library takes from ``AWS_*`` in the environment: credentials never come from a flag that others
    can read.

    ``timeout_s`` bounds one request with its body, ``connect_timeout_s`` a connection. A request
    that fails is repeated ``retries`` times within another ``timeout_s``.
    """

    bucket: str
    prefix: str = "stratakv"
    settings: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    concurrency: int = 16
    timeout_s: float = TIMEOUT_S
    connect_timeout_s: float = 3.0
    retries: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeOptions:
    """``master``: (host, port). ``host``: this client's address for its peers; "": the one that
    reaches the master. ``segment_bytes``: memory this process gives to the store.

    ``timeout_s`` bounds one question to the master, ``connect_timeout_s`` a connection to it. How
    long a peer may take over a transfer is between it and the client (``MC_TCP_*`` and
    ``MC_SLICE_TIMEOUT`` in the environment).
    """

    master: tuple[str, int]
    host: str = ""
    prefix: str = "stratakv"
    metadata: str = "P2PHANDSHAKE"
    transport: str = "tcp"
    devices: str = ""
    segment_bytes: int = 0
    buffer_bytes: int = 16 << 20
    batch_bytes: int = 64 << 20
    timeout_s: float = TIMEOUT_S
    connect_timeout_s: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginUrl:
    """Of a scheme that an installed package registered; its backend reads ``url`` itself."""

    scheme: str
    url: str


StorageUrl: TypeAlias = MemoryUrl | FileUrl | RedisOptions | S3Options | MooncakeOptions | PluginUrl


def parse_storage_url(text: str, plugins: Collection[str] = ()) -> StorageUrl:
    """``plugins``: schemes of installed packages. ConfigError names the flag and what is
    allowed."""
    try:
        parts = urlsplit(text)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:  # what it says may have a piece of the password
        raise _refused(
            text,
            "that is no URL; allowed is SCHEME://USER:PASSWORD@HOST:PORT/PATH, with / ? # @ [ ] "
            "in a password written as %2F %3F %23 %40 %5B %5D",
        ) from None
    if not port_is_fine:
        raise _refused(text, "allowed ports are 1 to 65535")
    if parts.scheme in plugins:
        return PluginUrl(scheme=parts.scheme, url=text)
    if not text.startswith(f"{parts.scheme}://") or parts.scheme not in _SCHEMES:
        schemes = ", ".join(f"{scheme}://" for scheme in (*_SCHEMES, *plugins))
        raise _refused(text, f"allowed are {schemes}")
    if parts.fragment:
        raise _refused(text, "allowed is a URL without a #")
    if parts.scheme == "memory":
        return _memory(text, parts)
    if parts.scheme == "file":
        return _file(text, parts)
    if parts.scheme == "s3":
        return _s3(text, parts)
    if parts.scheme == "mooncake":
        return _mooncake(text, parts)
    return _redis(text, parts)


def hidden(url: str) -> str:
    """``url`` without its password, for logs and answers."""
    return re.sub(r"(://[^/@:]*):.*@", r"\1:***@", url)


def _memory(text: str, parts: SplitResult) -> MemoryUrl:
    options = _options(text, parts, ("quota",))
    if parts.netloc or parts.path.strip("/"):
        raise _refused(text, "allowed is memory://?quota=SIZE")
    return MemoryUrl(quota_bytes=_quota(text, options, "1GiB"))


def _file(text: str, parts: SplitResult) -> FileUrl:
    options = _options(text, parts, ("quota", "ttl", "sync"))
    directory = unquote(parts.path)
    if parts.netloc not in {"", "localhost"} or not directory.strip("/"):
        raise _refused(text, "allowed is file:///DIRECTORY, an absolute path, three slashes")
    _check_path(text, directory)
    sync = options.get("sync", SYNCS[0])
    if sync not in SYNCS:
        raise _refused(text, f"allowed for sync are {', '.join(SYNCS)}")
    return FileUrl(
        directory=Path(directory),
        quota_bytes=_quota(text, options, DEFAULT_QUOTA),
        ttl_s=_duration(text, options, "ttl"),
        power_safe=sync == "power",
    )


def _redis(text: str, parts: SplitResult) -> RedisOptions:
    options = _options(text, parts, ("ttl", "timeout"))
    if parts.scheme == "redis+unix":
        if parts.netloc.rpartition("@")[2] or not parts.path.strip("/"):
            raise _refused(text, "allowed is redis+unix:///PATH of a socket")
        _check_path(text, unquote(parts.path))
        url = f"unix://{parts.netloc}{parts.path}"
    elif not parts.hostname or not re.fullmatch(r"/?\d*", parts.path):
        raise _refused(text, f"allowed is {parts.scheme}://HOST:PORT/NUMBER")
    else:
        url = f"{parts.scheme}://{parts.netloc}{parts.path}"
    return RedisOptions(
        url=url,
        ttl_s=_duration(text, options, "ttl"),
        timeout_s=_duration(text, options, "timeout") or TIMEOUT_S,
    )


def _s3(text: str, parts: SplitResult) -> S3Options:
    options = _options(text, parts, ("endpoint", "region", "timeout"))
    if not parts.netloc or "@" in parts.netloc or ":" in parts.netloc:
        raise _refused(text, "allowed is s3://BUCKET/PREFIX; credentials come from the environment")
    endpoint = options.get("endpoint")
    if endpoint is not None and not re.match(r"https?://[^/]", endpoint):
        raise _refused(text, "allowed for endpoint are http:// and https:// URLs")
    return S3Options(
        bucket=parts.netloc,
        prefix=unquote(parts.path).strip("/"),
        settings={name: options[name] for name in ("endpoint", "region") if name in options},
        timeout_s=_duration(text, options, "timeout") or TIMEOUT_S,
    )


def _mooncake(text: str, parts: SplitResult) -> MooncakeOptions:
    options = _options(text, parts, ("metadata", "protocol", "segment", "timeout"))
    if not parts.hostname or parts.port is None or parts.path.strip("/"):
        raise _refused(text, "allowed is mooncake://HOST:PORT of the master")
    host = parts.netloc.rpartition(":")[0]
    protocol = options.get("protocol", PROTOCOLS[0])
    if protocol not in PROTOCOLS:
        raise _refused(text, f"allowed for protocol are {', '.join(PROTOCOLS)}")
    return MooncakeOptions(
        master=(host.strip("[]"), parts.port),
        metadata=options.get("metadata", "P2PHANDSHAKE"),
        transport=protocol,
        segment_bytes=_size(text, options, "segment", "0"),
        timeout_s=_duration(text, options, "timeout") or TIMEOUT_S,
    )


def _options(text: str, parts: SplitResult, allowed: Collection[str]) -> dict[str, str]:
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise _refused(text, "allowed are options as NAME=VALUE, with & between them") from None
    options = dict(pairs)
    unknown = sorted(options.keys() - allowed)
    if unknown or len(options) != len(pairs):
        # After a ? in a password, the rest of it is read as an option.
        shown = ", ".join(name for name in unknown if name in hidden(text)) or "one of them"
        problem = f"{shown} is no option" if unknown else "an option is given twice"
        raise _refused(text, f"{problem}; allowed are {', '.join(allowed)}")
    return options


def _check_path(text: str, path: str) -> None:
    try:
        sound = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        sound = False
    if not sound:
        raise _refused(text, "allowed is a path that the file system can have, with no NUL in it")


def _size(text: str, options: dict[str, str], name: str, usual: str) -> int:
    found = bytes_of(options.get(name, usual))
    if found is None:
        raise _refused(text, f"allowed for {name} is {ALLOWED}")
    return found


def _quota(text: str, options: dict[str, str], usual: str) -> int:
    if (quota_bytes := _size(text, options, "quota", usual)) == 0:
        raise _refused(text, "allowed for quota is more than 0 bytes")
    return quota_bytes


def _duration(text: str, options: dict[str, str], name: str) -> float | None:
    """The option ``name`` in seconds; None where it is not given."""
    if name not in options:
        return None
    found = _DURATION.fullmatch(options[name])
    if found is None or float(found[1]) == 0:
        raise _refused(
            text, f"allowed for {name} is a number of seconds above 0, or one with s, m, h, d or w"
        )
    whole, _, part = found[1].partition(".")
    return int(whole + part) * _UNIT_S[found[2] or "s"] / 10 ** len(part)


def _refused(text: str, why: str) -> ConfigError:
    return ConfigError(f"{given(FLAG, hidden(text))}: {why}")


ROOT_FLAG = "--storage-root"


def check_roots(roots: Sequence[str]) -> None:
    """ConfigError for a root that is no directory of this machine."""
    for root in roots:
        if not Path(root).is_absolute() or not Path(root).is_dir():
            raise ConfigError(
                f"{given(ROOT_FLAG, root)}: allowed is the absolute path of a directory that exists"
            )


class Roots:
    """``roots``: below which any directory is allowed, and each itself. ``home``: the directory
    that the server was started with, which is allowed too; None: it had none."""

    def __init__(self, roots: Sequence[Path], home: Path | None = None) -> None:
        self._roots = tuple(roots)
        self._home = home

    def checked(self, url: StorageUrl) -> StorageUrl:
        """``url`` as it is to be opened, with no link left in its path; ConfigError where its
        directory is not allowed."""
        if not isinstance(url, FileUrl):
            return url
        directory = url.directory.resolve()
        at_home = self._home is not None and directory == self._home.resolve()
        if not at_home and not any(directory.is_relative_to(r.resolve()) for r in self._roots):
            raise ConfigError(
                f"{FLAG} {hidden(f'file://{url.directory}')}: a running server attaches no such "
                f"directory; allowed are {self._allowed()}"
            )
        return replace(url, directory=directory)

    def _allowed(self) -> str:
        known = [f"those below {ROOT_FLAG} {root}" for root in self._roots]
        if self._home is not None:
            known.append(f"{self._home}, with which it was started")
        if not self._roots:
            known.append(f"those below a {ROOT_FLAG}, of which it was started with none")
        return ", and ".join(known)

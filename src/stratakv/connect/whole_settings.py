"""What another engine computes with, as fields of a name: all of its settings but those that are
known to decide no byte of a page (``whole_variables`` has its variables).

Owns how a setting becomes text: of a file that it names every byte; of a directory names, sizes and
times, links followed; of a secret a hash. A list of what matters would miss what a new release
adds, and give a wrong hit; a list of what does not matter costs hits at worst. What is there and
cannot be read is refused. Must not know an engine's names.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.metadata import entry_points
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, NoReturn

from stratakv.core.errors import ConfigError

SECRET: Final = re.compile(
    r"KEY(?!_VALUE)(_|$)|SECRET|PASSWORD|CREDENTIAL|AUTHORIZATION|TOKEN$", re.IGNORECASE
)
"""Keys, at any depth of a setting, whose values are hashed before they are written down anywhere.
Heads for keys and values (``num_key_value_heads``) are none."""
NO_PATH: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})
"""Errors that say that a text is no path of this machine."""
MOST_FILES: Final = 10_000
"""And directories, in a directory that a setting names."""


def setting_fields(settings: Mapping[str, object], harmless: Collection[str]) -> dict[str, str]:
    """By name, all but ``harmless``. What a file or a directory that a setting names holds is a
    part of the setting."""
    return {name: _text(name, value) for name, value in settings.items() if name not in harmless}


def plugin_fields(*groups: str) -> dict[str, str]:
    """Packages that add to an engine, by its groups of entry points: their names and releases."""
    found = [
        f"{entry.value} {'' if entry.dist is None else entry.dist.version}"
        for group in groups
        for entry in entry_points(group=group)
    ]
    return {"plugins": " ".join(sorted(found))}


def code_field(packages: Collection[str]) -> dict[str, str]:
    """Every byte of Python below directories of code that no checkpoint and no release has."""
    parts = hashlib.sha256()
    for package in sorted(packages):
        for path in sorted(Path(package).rglob("*.py")):
            parts.update(f"{path.relative_to(package)}\0".encode())
            parts.update(hashlib.sha256(path.read_bytes()).digest())
    return {"external_code": parts.hexdigest() if packages else ""}


def flat_settings(
    config: Any,  # noqa: ANN401 - any engine's dataclass
    harmless: Mapping[str, Collection[str]],
    leaves: Collection[str] = (),
) -> dict[str, object]:
    """Of a dataclass of dataclasses, by dotted names. ``harmless``: by a class's name, its fields
    that decide nothing. ``leaves``: fields that are not looked into."""
    found: dict[str, object] = {}
    without = harmless.get(type(config).__name__, ())
    for field in fields(config):
        if field.name in without:
            continue
        value = getattr(config, field.name)
        if is_dataclass(value) and not isinstance(value, type) and field.name not in leaves:
            below = flat_settings(value, harmless, leaves)
            found |= {f"{field.name}.{name}": one for name, one in below.items()}
        else:
            found[field.name] = value
    return found


def _text(name: str, value: object) -> str:
    plain = _plain(name, value)
    if _is_secret(name):
        return _hashed(plain)
    text = json.dumps(plain, sort_keys=True)
    return plain if isinstance(plain, str) and not _is_json(plain) else text


def _is_secret(name: str) -> bool:
    return any(SECRET.search(part) for part in name.split("."))


def _hashed(plain: object) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _is_json(text: str) -> bool:
    """So a text that looks like a number or a list is another setting than that."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _plain(name: str, value: object) -> object:
    """Nothing but what JSON has; the same for the same settings in any process. ``name``: with the
    keys down to the value, by dots."""
    found: object = value
    match value:
        case Enum():
            found = value.name
        case None | bool() | int() | float():
            pass
        case str() | Path():
            found = f"{_without_secrets(str(value))}{contents(name, str(value))}"
        case Mapping():
            found = {str(key): _below(name, str(key), one) for key, one in value.items()}
        case list() | tuple():
            found = [_plain(name, one) for one in value]
        case set() | frozenset():
            found = sorted(json.dumps(_plain(name, one), sort_keys=True) for one in value)
        case type() | FunctionType() | BuiltinFunctionType():
            found = f"{value.__module__}.{value.__qualname__}"
        case _ if is_dataclass(value):
            found = {
                field.name: _below(name, field.name, getattr(value, field.name))
                for field in fields(value)
            }
        case _:  # where that has an address, nothing ever hits
            found = f"{type(value).__qualname__} {value!r}"
    return found


def _below(name: str, key: str, value: object) -> object:
    plain = _plain(f"{name}.{key}", value)
    return _hashed(plain) if _is_secret(key) else plain


def _without_secrets(text: str) -> str:
    """Of a text that is JSON, which some settings are given as."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    masked = _masked(value)
    return text if masked == value else json.dumps(masked, sort_keys=True)


def _masked(value: object) -> object:
    match value:
        case dict():
            return {
                key: _hashed(one) if _is_secret(key) else _masked(one) for key, one in value.items()
            }
        case list():
            return [_masked(one) for one in value]
        case _:
            return value


def contents(name: str, value: str) -> str:
    """What lies where ``value`` points to: empty for anything but a path. ConfigError for what is
    there and cannot be read."""
    try:
        status = os.stat(value)  # Path("") is a directory, and "" is none
    except ValueError:  # has a zero
        return ""
    except OSError as error:
        if error.errno in NO_PATH:
            return ""
        refuse(name, value, error)
    try:
        if stat.S_ISREG(status.st_mode):
            with Path(value).open("rb") as file:
                return f" {hashlib.file_digest(file, 'sha256').hexdigest()}"
        if stat.S_ISDIR(status.st_mode):
            return f" {listing(name, value)}"
    except OSError as error:
        refuse(name, value, error)
    if stat.S_ISFIFO(status.st_mode):
        refuse(name, value, OSError(errno.ESPIPE, "it is a pipe"))
    return f" {stat.S_IFMT(status.st_mode):o} {status.st_rdev}"  # a device, or a socket


def refuse(name: str, value: str, error: OSError) -> NoReturn:
    where, reason = _where(name, value), error.strerror
    if error.filename not in {None, value} and not _is_secret(name):
        reason = f"{error.filename}: {reason}"
    raise ConfigError(
        f"{where}: cannot be read ({reason}), and no name of a page can hold it; allowed is a file "
        "or a directory of which everything can be read, or what is no path"
    ) from None


def _where(name: str, value: str) -> str:
    return name if _is_secret(name) else f"{name} {value}"


def listing(name: str, directory: str) -> str:
    """Of names, sizes and times: a directory may hold weights, which take minutes to read. Of a
    link, those of what it points to, and where that is: a snapshot of a hub is made of links.
    OSError for what cannot be read; ConfigError, under ``name``, for more than ``MOST_FILES``."""
    return _digest(name, directory, _all_lines(directory))


def code_listing(
    name: str, directory: str, enters: Callable[[str], bool], counts: Callable[[str], bool]
) -> str:
    """The same of files that ``counts``, in directories that are entered: both are asked for paths
    below ``directory``. Directories themselves do not count, but where links lead."""
    return _digest(name, directory, _code_lines(directory, enters, counts))


def _digest(name: str, directory: str, lines: Iterator[str]) -> str:
    held: list[str] = []
    for line in lines:
        held.append(line)
        if len(held) > MOST_FILES:
            where = _where(name, directory)
            raise ConfigError(
                f"{where}: holds more than {MOST_FILES:,} files and directories, "
                "and no name of a page can hold them; allowed is a directory with fewer"
            )
    return hashlib.sha256("\0".join(sorted(held)).encode("utf-8", "surrogatepass")).hexdigest()


def _all_lines(directory: str) -> Iterator[str]:
    for below, files in _walk(directory, lambda _: True):
        yield from (_directory_line(path) for path in below)
        yield from (_file_line(path) for path in files)


def _code_lines(
    directory: str, enters: Callable[[str], bool], counts: Callable[[str], bool]
) -> Iterator[str]:
    def relative(path: str) -> str:
        return os.path.relpath(path, directory)

    for below, files in _walk(directory, lambda path: enters(relative(path))):
        yield from (_directory_line(path) for path in below if os.path.islink(path))
        yield from (_file_line(path) for path in files if counts(relative(path)))


def _walk(directory: str, enters: Callable[[str], bool]) -> Iterator[tuple[list[str], list[str]]]:
    """Paths of directories and of files, directory by directory; links are followed, once."""
    seen = {_place(os.stat(directory))}
    for above, below, names in os.walk(directory, onerror=_raise, followlinks=True):
        # Sorted: which of two links to one directory is the first.
        found = [path for one in sorted(below) if enters(path := os.path.join(above, one))]
        new: list[str] = []
        for path in found:
            place = _place(os.stat(path))
            if place not in seen:  # else a link leads round
                seen.add(place)
                new.append(os.path.basename(path))
        below[:] = new
        yield found, [os.path.join(above, one) for one in names]


def _directory_line(path: str) -> str:
    return f"{path}/\0{os.path.realpath(path)}"


def _file_line(path: str) -> str:
    target = os.path.realpath(path)
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if not os.path.islink(path):
            raise
        return f"{path}\0{target} is not there"
    times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
    return f"{path}\0{target} {status.st_mode:o} {status.st_size} {times}"


def _place(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _raise(error: OSError) -> NoReturn:
    raise error

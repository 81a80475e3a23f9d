"""What a command was given, by flag, environment, file or default, and where each value is from.

Owns their precedence, in that order, and the words that a refusal ends with where its value came
from no flag. Must not know what a value may be: the records of ``config`` do.
"""

import argparse
import re
import tomllib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from stratakv.core.errors import ConfigError
from stratakv.core.familiar import meant
from stratakv.core.options import PREFIX, Option, Value

Record = TypeVar("Record")

CONFIG_FLAG: Final = "--config"
CONFIG_VARIABLE: Final = f"{PREFIX}CONFIG"
DEFAULT: Final = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """``source``: the flag, the variable, ``KEY in FILE``, or ``DEFAULT``."""

    option: Option
    value: Value
    source: str

    @property
    def elsewhere(self) -> bool:
        """Neither on the command line nor left alone."""
        return self.source not in {DEFAULT, self.option.flag}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSettings:
    """All that one command was given. ``doubts``: lines for the operator, of variables that are
    none and look like one."""

    all: tuple[Setting, ...]
    doubts: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Setting:
        return next(one for one in self.all if one.option.name == name)

    def record(self, kind: type[Record]) -> Record:
        """A record of the settings that are its fields, and its defaults for others."""
        names = {field.name for field in fields(cast("Any", kind))}
        return kind(
            **{
                one.option.name: one.value
                for one in self.all
                if one.option.name in names and (one.source != DEFAULT or one.value is not None)
            }
        )

    @contextmanager
    def naming_sources(self) -> Generator[None]:
        """A ConfigError also says where what it refuses comes from, if from no flag."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{error}{self._sources(str(error))}") from error

    def _sources(self, message: str) -> str:
        named = [
            one
            for one in self.all
            if one.elsewhere and re.search(rf"(?<![\w-]){one.option.flag}(?![\w-])", message)
        ]
        return "".join(_from(one.option, one.source) for one in named)


def _from(option: Option, source: str) -> str:
    return f"; {option.flag} comes from {source}"


def resolve(
    arguments: argparse.Namespace,
    options: Sequence[Option],
    environment: Mapping[str, str],
    known: Sequence[Option] = (),
) -> ResolvedSettings:
    """Of a command with these options. ``known``: of other commands that read the same file.
    ``arguments``: have what was given, and nothing else. ConfigError for a value or a file that
    cannot be read."""
    flags = vars(arguments)
    path = flags.get("config") or environment.get(CONFIG_VARIABLE)
    file = _file(path, (*options, *known)) if path else {}
    found = [_setting(option, flags, environment, file, path) for option in options]
    return ResolvedSettings(all=tuple(found), doubts=_doubts(environment, (*options, *known)))


def _setting(
    option: Option,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Mapping[str, object],
    path: str | None,
) -> Setting:
    value: Value = flags.get(option.name)
    if value is not None:
        value = tuple(value) if isinstance(value, list) else value
        return Setting(option=option, value=value, source=option.flag)
    source = option.variable
    try:
        if source in environment:
            return Setting(option=option, value=option.parse(environment[source]), source=source)
        source = f"{option.key} in {path}"
        if option.key in file:
            return Setting(option=option, value=option.read(file[option.key]), source=source)
    except ConfigError as error:
        raise ConfigError(f"{error}{_from(option, source)}") from None
    return Setting(option=option, value=option.default, source=DEFAULT)


def _file(path: str, options: Sequence[Option]) -> Mapping[str, object]:
    """What it says by key; a key may be written with underscores."""
    try:
        found = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{CONFIG_FLAG} {path}: {error}; allowed is a TOML file that can be read"
        ) from None
    keys = {option.key for option in options}
    values: dict[str, object] = {}
    for written, value in found.items():
        key = written.replace("_", "-")
        if key not in keys:
            like = meant(key, keys)
            asked = f" ({like}?)" if like else ""
            raise ConfigError(
                f"{CONFIG_FLAG} {path}: it sets {written}, which is no setting{asked}; allowed are "
                "those that `stratakv config schema` prints"
            )
        if key in values:
            raise ConfigError(f"{CONFIG_FLAG} {path}: it sets {key} twice; allowed is once")
        values[key] = value
    return values


def _doubts(environment: Mapping[str, str], options: Sequence[Option]) -> tuple[str, ...]:
    """Others have variables that begin alike, as Kubernetes sets them for a service of our name."""
    known = {CONFIG_VARIABLE, *(option.variable for option in options)}
    names = {
        variable.removeprefix(PREFIX).lower().replace("_", "-"): variable for variable in known
    }
    found: list[str] = []
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            like = meant(name.removeprefix(PREFIX), names)
            found += [f"{name} is no setting; is {names[like]} meant?"] if like else []
    return tuple(found)

"""Every setting by its names: a flag, a variable of the environment, a key of a file.

Owns how a field of the records in ``config`` is spelled in each, and how its value is read from
there. Names, defaults and what is allowed are the records', words are ``flag_help``'s. Must not
read the environment or a file (``settings``).
"""

from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeAlias, assert_never

from stratakv.core.choices import given
from stratakv.core.errors import ConfigError
from stratakv.core.flag_help import CHOICES, HELP, METAVAR

PREFIX: Final = "STRATAKV_"
SECRETS: Final = frozenset({"api_key", "admin_key"})
"""Whose values are never shown."""
Value: TypeAlias = str | int | float | bool | tuple[str, ...] | Path | None
NUMBERS: Final[dict[type[int | float], str]] = {int: "a whole number", float: "a number"}
_SWITCH: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class OptionKind(Enum):
    """What the values of an option are."""

    WHOLE = "integer"
    NUMBER = "number"
    SWITCH = "boolean"
    LIST = "array"
    TEXT = "string"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """``name``: of the field. ``default``: None where nothing is set. ``positional``: on a command
    line it has no dashes, and stands by itself."""

    name: str
    kind: OptionKind
    default: Value
    positional: bool = False

    @property
    def key(self) -> str:
        """In a file."""
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        return self.name.upper() if self.positional else f"--{self.key}"

    @property
    def variable(self) -> str:
        """Of the environment."""
        return PREFIX + self.name.upper()

    @property
    def choices(self) -> tuple[str, ...]:
        """All that is allowed, where that is a list of words; empty where it is not."""
        return CHOICES.get(self.name, ())

    @property
    def shown_default(self) -> str:
        """Empty where nothing is set."""
        unset = self.default is None or self.default is False or self.default == ()
        return "" if unset else str(self.default)

    @property
    def metavar(self) -> str:
        number = {OptionKind.WHOLE: "INT", OptionKind.NUMBER: "FLOAT"}.get(self.kind, "STR")
        named = f"{{{','.join(self.choices)}}}" if self.choices else number
        return METAVAR.get(self.name, named)

    @property
    def help(self) -> str:
        return HELP[self.name]

    def parse(self, text: str) -> Value:
        """From a variable; ConfigError names the flag. Of a list, commas part the items."""
        flag = self.flag
        match self.kind:
            case OptionKind.WHOLE:
                return number_of(flag, text, int)
            case OptionKind.NUMBER:
                return number_of(flag, text, float)
            case OptionKind.SWITCH:
                if text.lower() not in _SWITCH:
                    raise ConfigError(f"{given(flag, text)}: allowed are true, false")
                return _SWITCH[text.lower()]
            case OptionKind.LIST:
                return tuple(part for part in text.split(",") if part)
            case OptionKind.TEXT:
                return text
            case _:
                assert_never(self.kind)

    def read(self, value: object) -> Value:
        """From a file, as TOML has it; the same. A size may be a number of bytes, or
        a share."""
        match self.kind, value:
            case OptionKind.SWITCH, bool():
                return value
            case ((OptionKind.WHOLE | OptionKind.NUMBER), bool()):
                pass
            case OptionKind.WHOLE, int():
                return value
            case OptionKind.NUMBER, int() | float():
                return float(value)
            case OptionKind.LIST, [*items] if all(isinstance(item, str) for item in items):
                return tuple(map(str, items))
            case OptionKind.TEXT, str():
                return value
            case OptionKind.TEXT, int() | float() if not isinstance(value, bool):
                return str(value)
            case _:
                pass
        allowed = {
            OptionKind.WHOLE: "a whole number",
            OptionKind.NUMBER: "a number",
            OptionKind.SWITCH: "true and false",
            OptionKind.LIST: "a list of texts",
            OptionKind.TEXT: "a text",
        }
        flag, shown = self.flag, "***" if self.name in SECRETS else value
        raise ConfigError(f"{given(flag, shown)}: allowed is {allowed[self.kind]}")


MODEL: Final = Option(name="model", kind=OptionKind.TEXT, default=None, positional=True)
"""What is served."""


def number_of(flag: str, text: object, kind: type[int | float]) -> int | float:
    """ConfigError where ``text`` is none."""
    try:
        return kind(str(text))
    except ValueError:
        raise ConfigError(f"{given(flag, text)}: allowed is {NUMBERS[kind]}") from None


def options_of(record: type[Any], only: Collection[str] | None = None) -> tuple[Option, ...]:
    """One per field of a record of settings, or per field that is in ``only``."""
    found: list[Option] = []
    for field in fields(record):
        if only is None or field.name in only:
            kind = _kind_of(str(field.type))
            least = () if kind is OptionKind.LIST else None
            default = least if field.default is MISSING else field.default
            found.append(Option(name=field.name, kind=kind, default=default))
    return tuple(found)


def _kind_of(annotation: str) -> OptionKind:
    for part, kind in (
        ("bool", OptionKind.SWITCH),
        ("tuple", OptionKind.LIST),
        ("int", OptionKind.WHOLE),
        ("float", OptionKind.NUMBER),
    ):
        if part in annotation:
            return kind
    return OptionKind.TEXT

"""A command line in one wording: every refusal names the flag, and what is allowed.

Owns the words for what argparse itself refuses, which its versions word each in their own way. Must
not know which flags there are, or check what a setting may be (``choices``, ``config``).
"""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

from stratakv.core.errors import ConfigError
from stratakv.core.familiar import meant
from stratakv.core.flag_help import RENAMED
from stratakv.core.options import Option, OptionKind, number_of


class FlagParser(argparse.ArgumentParser):
    """One that refuses what it does not know itself, in one line, where a server's usage has sixty.
    Raises ConfigError where argparse would exit."""

    _needed: Mapping[str, str] = MappingProxyType({})
    _positions: Mapping[str, str] = MappingProxyType({})
    parts: Mapping[str, "FlagParser"] = MappingProxyType({})
    """By the word that follows."""

    def divide(self, name: str) -> "Callable[..., FlagParser]":
        """What adds a part: a word, called ``name``, has to follow, and has a parser of its own."""
        below = self.add_subparsers(metavar=name)
        self.parts = below.choices
        self.set_defaults(run=missing(name, below.choices))
        return below.add_parser

    def flags(self) -> list[str]:
        """All that ``--help`` lists."""
        lines = re.findall(r"^  (-\S.*?)(?:  |$)", self.format_help(), re.MULTILINE)
        return [flag for line in lines for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", line)]

    def offer(self, options: Iterable[Option], title: str | None = None) -> None:
        """A flag for each; of one that is not given, nothing is known afterwards."""
        group = self if title is None else self.add_argument_group(title)
        for option in options:
            shown = f" (default: {option.shown_default})" if option.shown_default else ""
            text = option.help + shown
            if option.positional:
                self._positions = {**self._positions, option.key: option.flag}
                group.add_argument(
                    option.name, nargs="?", default=argparse.SUPPRESS, metavar=option.flag,
                    help=text,
                )  # fmt: skip
                continue
            more: dict[str, Any] = {"action": _ACTIONS[option.kind], "metavar": option.metavar}
            if option.kind is OptionKind.SWITCH:
                del more["metavar"]
            group.add_argument(
                option.flag, dest=option.name, default=argparse.SUPPRESS, help=text, **more
            )

    def need(self, name: str, allowed: str, kind: type[str | Path] = str) -> None:
        """An argument that must be there."""
        self._needed = {**self._needed, name: allowed}
        self._positions = {**self._positions, name.lower(): name}
        self.add_argument(name.lower(), type=kind, metavar=name, help=allowed)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - one of its forms
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        into = argparse.Namespace() if namespace is None else namespace
        known, unknown = super().parse_known_args(args, into)
        if unknown:
            raise ConfigError(
                f"{' '.join(unknown)}: not of {self.prog}{self._meant(unknown[0])}; "
                f"allowed is what `{self.prog} --help` lists"
            )
        return known, unknown

    def _meant(self, word: str) -> str:
        shown = dict(self._positions)
        shown |= {flag.lstrip("-"): flag for flag in self.flags() if flag.startswith("--")}
        like = meant(word.partition("=")[0], shown) if word.startswith("--") else None
        return f" ({shown[like]}?)" if like else ""

    def error(self, message: str) -> NoReturn:
        """``message``: argparse's."""
        if found := re.fullmatch(r"the following arguments are required: (\w+).*", message):
            raise ConfigError(f"{found[1]} is missing; allowed is {self._needed[found[1]]}")
        raise ConfigError(_reworded(message))


def missing(name: str, allowed: Iterable[str] | None) -> Callable[[argparse.Namespace], int]:
    """What a command line without a choice among ``allowed`` runs: its refusal."""

    def refused(_: argparse.Namespace) -> int:
        raise ConfigError(f"{name} is missing; allowed are {', '.join(allowed or ())}")

    return refused


def _reworded(message: str) -> str:
    """As it is where there are no words for it here."""
    if found := re.fullmatch(r"argument (\S+): expected one argument", message):
        return f"{found[1]}: its value is missing; allowed is one"
    if found := re.fullmatch(r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)", message):
        value, allowed = (text.replace("'", "") for text in found.groups()[1:])
        return f"{found[1]} {value}: allowed are {allowed}"
    if found := re.fullmatch(r"argument (\S+): ignored explicit argument '(.*)'", message):
        return f"{found[1]} {found[2]}: allowed is no value"
    return message


class Number(argparse.Action):
    """What argparse's ``type`` would be, which words a refusal itself."""

    kind: type[int | float] = float

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        del parser
        flag = option_string or self.option_strings[0]
        setattr(namespace, self.dest, number_of(flag, values, self.kind))


class WholeNumber(Number):
    """The same for an int."""

    kind = int


_ACTIONS: Final[Mapping[OptionKind, str | type[argparse.Action]]] = {
    OptionKind.WHOLE: WholeNumber,
    OptionKind.NUMBER: Number,
    OptionKind.SWITCH: argparse.BooleanOptionalAction,
    OptionKind.LIST: "append",
    OptionKind.TEXT: "store",
}


class Renamed(argparse.Action):
    """A flag that has another name now; refused, so that nobody's server changes unseen."""

    def __call__(self, *_: object) -> None:
        old = self.option_strings[0]
        raise ConfigError(
            f"{old}: its name is {RENAMED[old.removeprefix('--')]} now; allowed is that"
        )

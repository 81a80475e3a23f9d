"""``stratakv config``: what a server would be given, and what a file of settings may say.

Owns the options of a server in their order, what ``config show`` and ``config schema`` print, and
which values are masked. Starts nothing.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from stratakv.core.choices import check_written
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.core.flag_parser import FlagParser
from stratakv.core.options import MODEL, SECRETS, Option, OptionKind, Value, options_of
from stratakv.core.server_checks import check_together
from stratakv.core.settings import ResolvedSettings, Setting, resolve
from stratakv.storage.urls import hidden

SERVER_OPTIONS: Final = (MODEL, *options_of(EngineConfig), *options_of(ServerConfig))
MASK: Final = "***"


def offer_config_file(parser: FlagParser) -> None:
    parser.add_argument(
        "--config",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="a TOML file of settings, their keys as the flags; flags and STRATAKV_* variables win",
    )


def offer_server(parser: FlagParser) -> None:
    """All that ``serve`` takes."""
    parser.offer([MODEL])
    offer_config_file(parser)
    parser.offer(options_of(EngineConfig), "engine")
    parser.offer(options_of(ServerConfig), "server")


def model_of(settings: ResolvedSettings) -> Path:
    """ConfigError where none is named."""
    model = settings[MODEL.name].value
    if model is None:
        raise ConfigError(f"MODEL is missing; allowed is {MODEL.help}")
    return Path(str(model))


def add_verb(add_parser: Callable[..., FlagParser]) -> None:
    """``add_parser``: of the verbs of ``stratakv``."""
    add_part = add_parser("config", help="the settings of a server, without one").divide("PART")
    show = add_part("show", help="each value and where it comes from", allow_abbrev=False)
    show.add_argument("--json", metavar="FILE", help="also write it there")
    offer_server(show)
    show.set_defaults(run=_show)
    schema = add_part("schema", help="the JSON schema of a file of settings", allow_abbrev=False)
    schema.set_defaults(run=_schema)


def _show(arguments: argparse.Namespace) -> int:
    check_written("--json", arguments.json)
    settings = resolve(arguments, SERVER_OPTIONS, os.environ)
    with settings.naming_sources():
        check_together(settings.record(EngineConfig), settings.record(ServerConfig))
    lines = [f"# {doubt}" for doubt in settings.doubts]
    lines += [_line(one) for one in settings.all]
    sys.stdout.write("\n".join(lines) + "\n")
    if arguments.json is not None:
        figures = {
            one.option.key: {"value": shown(one), "source": one.source} for one in settings.all
        }
        Path(arguments.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def shown(setting: Setting) -> Value:
    """Its value as anybody may see it."""
    value = setting.value
    if value is None:
        return None
    if setting.option.name in SECRETS:
        return MASK
    return hidden(str(value)) if setting.option.name == "storage" else value


def _line(setting: Setting) -> str:
    """As a file of settings would have it; what is not set is a comment, and what is hidden: such a
    file must not make a key of the mask."""
    value = shown(setting)
    text = f"# {setting.option.key} is not set"
    if value is not None:
        text = f"{setting.option.key} = {json.dumps(value, ensure_ascii=False)}"
        if value != setting.value:
            text = f"# {text}"
    return f"{text:<44} # {setting.source}"


def _schema(_: argparse.Namespace) -> int:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of stratakv serve",
        "type": "object",
        "additionalProperties": False,
        "properties": {option.key: _property(option) for option in SERVER_OPTIONS},
    }
    sys.stdout.write(json.dumps(schema, indent=2) + "\n")
    return 0


_SIZES: Final = {"SIZE": ["string", "integer"], "SIZE|SHARE": ["string", "number"]}


def _property(option: Option) -> Mapping[str, object]:
    kind: object = option.kind.value
    if option.kind is OptionKind.TEXT:
        kind = _SIZES.get(option.metavar, kind)
    found: dict[str, object] = {"description": option.help, "type": kind}
    if option.kind is OptionKind.LIST:
        found["items"] = {"type": "string"}
    if option.choices:
        found["enum"] = list(option.choices)
    if option.default is not None:
        found["default"] = option.default
    return found

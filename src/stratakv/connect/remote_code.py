"""Code that a checkpoint or a setting names, and that lies elsewhere than in the checkpoint.

Owns its refusal: transformers takes such code from the cache of a hub, where the next download
changes it, and no name has its bytes. Not asked is whether the engine was told to trust it: SGLang
loads classes for ``--model-impl transformers`` and some processors without. Must not load any.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, cast

from stratakv.core.errors import ConfigError

CODE: Final = "auto_map"
"""The key that leads from what ``AutoModel`` and its like are asked for to classes."""
ELSEWHERE: Final = "--"
"""Between a repository and the class in it."""


def refuse_code_elsewhere(flag: str, directory: Path) -> None:
    """ConfigError where a JSON file in ``directory`` names such code, or cannot be read."""
    try:
        for path in sorted(directory.rglob("*.json")):
            if path.is_file():
                name = path.relative_to(directory).as_posix()
                refuse_named_code(f"{flag} {directory}: {name}", _objects(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"{flag} {directory}: its settings cannot be read: {error}") from error


def refuse_named_code(where: str, settings: object) -> None:
    """ConfigError where ``settings``, as JSON has them, name such code. ``where``: they are."""
    for key, value in _named(settings, ""):
        if ELSEWHERE in value or Path(value).is_absolute():
            raise ConfigError(
                f"{where}: {CODE} {key} {value} is code that does not lie beside the model, and "
                f"may be exchanged; allowed is a copy beside it, named without {ELSEWHERE}, or no "
                f"such entry in {CODE}"
            )


def directory_of(flag: str, name: str) -> Path:
    """That a setting names; ConfigError where that is no directory of this machine."""
    path = Path(name)
    if not path.is_dir():
        raise ConfigError(
            f"{flag} {name}: allowed is a directory; one from a hub is named by where it was "
            "downloaded to"
        )
    return path


def _named(settings: object, key: str, *, within: bool = False) -> Iterator[tuple[str, str]]:
    """Classes at any depth, with the keys that they are under. ``within``: an ``auto_map``."""
    match settings:
        case str():
            if within:
                yield key, settings
        case Mapping():
            for name, value in cast("Mapping[object, object]", settings).items():
                below = str(name) if within else key
                yield from _named(value, below, within=within or name == CODE)
        case list() | tuple():
            for value in cast("list[object]", settings):
                yield from _named(value, key, within=within)
        case _:
            pass


def _objects(text: bytes) -> list[dict[str, object]]:
    """Those at any depth that have the key; none of what no loader can read either. Tokenizers are
    large, and nearly all lists: only objects are looked at."""
    found: list[dict[str, object]] = []

    def look(one: dict[str, object]) -> dict[str, object]:
        if CODE in one:
            found.append({CODE: one[CODE]})
        return one

    try:
        json.loads(text, object_hook=look)
    except (ValueError, RecursionError):
        return []
    return found

"""Which files of a model directory decide its arithmetic, and what they say, but for the weights.

Owns the choice of files, which is Hugging Face's loader's, and the looks at them. Must not read
weights.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from stratakv.core.identity.file_stat import FileStat, Kernel, open_file, stat_file
from stratakv.core.identity.safetensors_layout import Layout, read_layout

WHOLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
HARMLESS: Final = frozenset({
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "chat_template.json", "preprocessor_config.json",
    "processor_config.json", "video_preprocessor_config.json", INDEX,
})  # fmt: skip
"""Of text, of images, and of when to stop. What the index says is in which files there are."""


@dataclass(frozen=True, slots=True)
class SettingsFile:
    path: Path
    stat: FileStat
    contents: bytes


@dataclass(frozen=True, slots=True)
class WeightsFile:
    path: Path
    stat: FileStat
    layout: Layout


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``settings``: ``config.json`` and every other JSON that is not known to be harmless, by name.
    ``index``: what names the weights' files, if anything does. ``weights``: in the order in which
    they are loaded, so that of two tensors of one name the later counts."""

    settings: Sequence[SettingsFile]
    index: SettingsFile | None
    weights: Sequence[WeightsFile]

    def parts(self) -> Iterator[bytes]:
        """What is to be framed of it beside tensors: settings as they stand, and the metadata of
        the weights' files, together, since which of them a tensor is in does not matter."""
        for file in self.settings:
            yield b"settings " + os.fsencode(file.path.name)
            yield file.contents
        named: dict[tuple[str, str], None] = {}
        for weights in self.weights:
            for name, value in sorted(weights.layout.metadata.items()):
                named.setdefault((name, value))
        # Stable: of two values of one name, the order of their files says which counts.
        for name, value in sorted(named, key=lambda pair: pair[0]):
            yield b"metadata " + name.encode("utf-8", "surrogatepass")
            yield value.encode("utf-8", "surrogatepass")


def read_checkpoint(directory: Path, kernel: Kernel) -> Checkpoint:
    """OSError or ValueError where it cannot be read, or not as Hugging Face would read it."""
    settings = [
        _settings(path, kernel)
        for path in sorted(directory.glob("*.json"))
        if path.name not in HARMLESS and path.is_file()
    ]
    whole, index = directory / WHOLE, None
    if whole.is_file():
        paths = [whole]
    else:
        index = _settings(directory / INDEX, kernel)
        paths = [directory / name for name in _shards(index.contents)]
    return Checkpoint(settings, index, [_weights(path, kernel) for path in paths])


def change_since(found: Checkpoint, directory: Path, kernel: Kernel) -> str:
    """What is not as ``found`` any more; empty where all is."""
    try:
        again = read_checkpoint(directory, kernel)
    except (OSError, ValueError) as error:
        return str(error)
    if [file.path for file in _files(found)] != [file.path for file in _files(again)]:
        return "its files"
    for file, other in zip(_files(found), _files(again), strict=True):
        if _read(file) != _read(other) or not file.stat.may_match(other.stat):
            return file.path.name
    return ""


def _files(found: Checkpoint) -> list[SettingsFile | WeightsFile]:
    index = [] if found.index is None else [found.index]
    return [*found.settings, *index, *found.weights]


def _read(file: SettingsFile | WeightsFile) -> bytes | Layout:
    return file.contents if isinstance(file, SettingsFile) else file.layout


def _settings(path: Path, kernel: Kernel) -> SettingsFile:
    fd = open_file(path)
    with os.fdopen(fd, "rb") as file:
        return SettingsFile(path, stat_file(path, fd, kernel), file.read())


def _weights(path: Path, kernel: Kernel) -> WeightsFile:
    fd = open_file(path)
    try:
        found = stat_file(path, fd, kernel)
        return WeightsFile(path, found, read_layout(fd, found.size))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    finally:
        os.close(fd)


def _shards(text: bytes) -> list[str]:
    """As ``get_checkpoint_shard_files`` of transformers finds and orders them."""
    try:
        index: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{INDEX}: {error}") from None
    match index:
        case {"weight_map": dict(found)} if found:
            names = set(cast("Mapping[str, object]", found).values())
        case _:
            raise ValueError(f"{INDEX} has no weight_map")
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{INDEX} names a file that is no text")
    return sorted(cast("set[str]", names))

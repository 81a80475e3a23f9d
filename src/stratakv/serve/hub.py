"""A model by its name on the Hugging Face hub: from the local cache, or downloaded into it.

Owns when the network is asked: never for what the cache has whole, and never for long without an
answer. Must not know models, nor import torch.
"""

import json
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypedDict

from stratakv.core.config import ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.core.units import format_bytes

log = logging.getLogger(__name__)

HUB_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
"""An owner and a model's name. A path may look alike: a directory that is there is meant."""
FILES: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""What a server reads of a model; weights in other formats stay where they are."""
ANSWER_S: Final = 5.0
"""In which the hub says what it has of a model."""
CONFIG, INDEX, TOKENIZER = "config.json", "model.safetensors.index.json", "tokenizer.json"


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """``name``: on the hub, None of a directory that was named as one."""

    path: Path
    name: str | None

    def named(self, server: ServerConfig) -> ServerConfig:
        """Clients use the hub's name where they were given no other."""
        if self.name is None or server.served_model_name is not None:
            return server
        return replace(server, served_model_name=self.name)


def locate(model: Path) -> LocatedModel:
    """Where ``model`` lies, a directory or a name of the hub. ConfigError for a name that is
    neither in the cache nor to be had. Hugging Face's variables count: ``HF_HOME``, ``HF_TOKEN``,
    ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``."""
    name = str(model)
    if model.exists() or not HUB_NAME.fullmatch(name):
        return LocatedModel(model, None)
    cached = _cached(name)
    if cached is not None and _is_whole(cached):
        log.info("%s is in the Hugging Face cache: %s", name, cached)
        return LocatedModel(cached, name)
    return LocatedModel(_downloaded(name), name)


def _cached(name: str) -> Path | None:
    """What the cache has of it, perhaps a part; Path of its newest snapshot."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - takes seconds; only for names
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(name, local_files_only=True, **_ours()))
    except LocalEntryNotFoundError:
        return None


class _Patterns(TypedDict):
    """Hugging Face's words."""

    allow_patterns: list[str]
    ignore_patterns: list[str]


def _ours() -> _Patterns:
    """Of files; without them, what was left out of a download would count as missing."""
    return {"allow_patterns": list(FILES), "ignore_patterns": ["*/*"]}


def _is_whole(path: Path) -> bool:
    """Whether all is there that a server reads: a download may have been interrupted."""
    if not (path / CONFIG).is_file() or not (path / TOKENIZER).is_file():
        return False
    if not (path / INDEX).is_file():
        return any(path.glob("*.safetensors"))
    weights = json.loads((path / INDEX).read_text("utf-8"))["weight_map"]
    return all((path / file).is_file() for file in set(weights.values()))


def _downloaded(name: str) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download  # noqa: PLC0415

    try:
        about = HfApi().model_info(name, timeout=ANSWER_S, files_metadata=True)
        wanted = [file for file in about.siblings or () if _is_wanted(file.rfilename)]
        size = format_bytes(sum(file.size or 0 for file in wanted))
        log.info("downloading %s, %s in %d files", name, size, len(wanted))
        found = snapshot_download(name, **_ours())
    except Exception as error:
        raise ConfigError(
            f"MODEL {name}: allowed is a directory with a Hugging Face config.json, or a name on "
            f"the hub. There is no such directory; the cache in {constants.HF_HUB_CACHE} does not "
            f"have it whole; and {_why(error, constants.ENDPOINT)}"
        ) from error
    log.info("downloaded %s to %s", name, found)
    return Path(found)


def _is_wanted(file: str) -> bool:
    path = Path(file)
    return len(path.parts) == 1 and any(path.match(pattern) for pattern in FILES)


def _why(error: Exception, endpoint: str) -> str:
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    match error:
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set, so that the hub is not asked"
        case GatedRepoError():
            return f"{endpoint} gives it to those alone who accepted its terms (HF_TOKEN)"
        case RepositoryNotFoundError():
            return f"{endpoint} has no such model, or not for you (HF_TOKEN)"
        case _:
            first = str(error).partition("\n")[0]
            return f"{endpoint} could not be asked: {type(error).__name__}: {first}"

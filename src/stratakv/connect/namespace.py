"""Under which names another engine's pages are stored.

Owns what is hashed into a name: the weights, and every setting of the engine that decides what a
page holds or how its bytes lie. An engine's own block hash knows tokens and salt and no more, so
two engines may share a page only if all of this is the same. Must not know an engine's classes.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from stratakv.connect.remote_code import directory_of, refuse_code_elsewhere
from stratakv.core.errors import ConfigError
from stratakv.core.identity.digests import framed
from stratakv.core.identity.file_stat import Kernel, boot_of_this_machine
from stratakv.core.identity.model_files import read_checkpoint
from stratakv.core.ids import PageKey
from stratakv.core.model_identity import ModelIdentity

FORMAT: Final = b"stratakv-connect-1"
PROCESSING: Final = (
    "preprocessor_config.json", "processor_config.json", "tekken.json",
    "video_preprocessor_config.json",
)  # fmt: skip
"""Files that say what a model sees of an image, a video or a sound. An engine's block hash has what
the client sent, and not what became of it."""
TOKENIZER: Final = "tokenizer_config.json"
"""Also says which class does that, where none of these files do: two of its fields, and all else of
it makes tokens of a text."""


@dataclass(frozen=True, slots=True)
class EngineNamespace:
    """``digest``: 32 bytes. Pages of two namespaces never have one name."""

    digest: bytes

    @classmethod
    def of(cls, models: Sequence[bytes], fields: Mapping[str, str]) -> "EngineNamespace":
        """``models``: identities of all weights that fill the pages. ``fields``: what else decides
        them, by name."""
        parts = [FORMAT, b"%d" % len(models), *models]
        for name, value in sorted(fields.items()):
            parts += [name.encode(), value.encode("utf-8", "surrogatepass")]
        return cls(framed(parts))

    def renewed(self) -> "EngineNamespace":
        """A new one that nobody else has, nor ever will: for weights that nobody can identify."""
        return EngineNamespace(framed([FORMAT, self.digest, secrets.token_bytes(32)]))

    @property
    def spec_digest(self) -> bytes:
        """16 bytes, for the store's headers."""
        return self.digest[:16]

    def page_key(self, block: bytes) -> PageKey:
        """The name of the page that the engine calls ``block``, all of whose hashes are as long."""
        return PageKey(hashlib.sha256(self.digest + block).digest())


def identify_weights(directory: Path) -> bytes:
    """32 bytes over every byte in ``directory`` that decides what a model computes, also the code
    that comes with it, and files of weights that Hugging Face's loader leaves out: engines choose
    others (``consolidated``, or all there are). Reads all weights that were not read lately.

    ConfigError where it holds no model with safetensors, or names code that lies elsewhere.
    """
    refuse_code_elsewhere("MODEL", directory)
    code = _code("MODEL", directory)
    processing = _processing("MODEL", directory)
    with ModelIdentity(directory) as identity:
        return framed([identity.finish(), *code, *processing, *_other_weights(directory)])


def processing_field(flag: str, tokenizer: str, model: str) -> Mapping[str, str]:
    """What of ``PROCESSING`` another directory has than the model's, from which engines take it as
    well, with the model's type there, and the code. Its tokens decide no page.

    ConfigError where it cannot be read, is no directory, or names code that lies elsewhere.
    """
    if tokenizer == model:
        return {"processing": ""}
    there = directory_of(flag, tokenizer)
    refuse_code_elsewhere(flag, there)
    files = [*_processing(flag, there), *_read(flag, there, "config.json"), *_code(flag, there)]
    return {"processing": framed(files).hex() if files else ""}


def _processing(flag: str, directory: Path) -> list[bytes]:
    """Names and bytes."""
    found = [part for name in PROCESSING for part in _read(flag, directory, name)]
    for text in _read(flag, directory, TOKENIZER)[1:]:
        found += _processor(text)
    return found


def _processor(text: bytes) -> list[bytes]:
    """What a tokenizer's configuration says of the processor around it; all of one that is none."""
    try:
        given: object = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        return [TOKENIZER.encode(), text]
    fields = cast("dict[str, Any]", given)
    code = fields.get("auto_map")
    code = code.get("AutoProcessor") if isinstance(code, dict) else code
    chosen = {"processor_class": fields.get("processor_class"), "auto_map": code}
    if not any(chosen.values()):
        return []
    return [TOKENIZER.encode(), json.dumps(chosen, sort_keys=True).encode()]


def _read(flag: str, directory: Path, name: str) -> list[bytes]:
    """Its name and bytes; empty where there is none."""
    try:
        return [name.encode(), (directory / name).read_bytes()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"{flag} {directory}: {name} cannot be read ({error.strerror}); allowed is a "
            "directory whose files this user may read"
        ) from error


def _code(flag: str, directory: Path) -> list[bytes]:
    """Names and bytes of all Python in there."""
    code: list[bytes] = []
    try:
        for path in sorted(directory.rglob("*.py")):
            code += [path.relative_to(directory).as_posix().encode(), path.read_bytes()]
    except OSError as error:
        raise ConfigError(f"{flag} {directory}: its code cannot be read: {error}") from error
    return code


def _other_weights(directory: Path) -> list[bytes]:
    """Indexes as they stand, and files of weights that ``ModelIdentity`` does not read, by name."""
    kernel, found = Kernel(boot=boot_of_this_machine()), list[bytes]()
    try:
        chosen = {file.path.name for file in read_checkpoint(directory.resolve(), kernel).weights}
        for path in sorted(directory.glob("*.safetensors.index.json")):
            found += [path.name.encode(), path.read_bytes()]
        for path in sorted(directory.glob("*.safetensors")):
            if path.name not in chosen:
                with path.open("rb") as file:
                    found += [path.name.encode(), hashlib.file_digest(file, "sha256").digest()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"MODEL {directory}: its weights cannot be read: {error}") from error
    return found

"""What another engine computes with, as fields of a name: all of its settings and variables but
those that are known to decide no byte of a page.

Owns how a setting becomes text. A list of what matters would miss what a new release adds, and give
a wrong hit; a list of what does not matter costs hits at worst. Must not know an engine's names.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.metadata import entry_points
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

from stratakv.core.errors import ConfigError

SECRET: Final = re.compile(r"_KEY(_|$)|SECRET|PASSWORD|_TOKEN$", re.IGNORECASE)
"""Settings whose values are hashed before they are written down anywhere."""
ARITHMETIC: Final = (
    "AITER_", "CK_MOE", "CUBLAS", "DG_", "DNNL_", "FLASHINFER_", "MIOPEN_", "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_", "ROCM_QUICK_REDUCE_", "TORCH_ALLOW_TF32", "TRTLLM_",
)  # fmt: skip
"""Beginnings of variables by which libraries below the engines choose how to compute."""
CACHES: Final = frozenset({
    "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_LOG_LEVEL", "CUBLAS_LOGINFO_DBG", "DG_JIT_CACHE_DIR",
    "DG_JIT_DEBUG", "DG_JIT_USE_NVRTC", "DNNL_VERBOSE", "FLASHINFER_CACHE_DIR",
    "FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_DISABLE_VERSION_CHECK", "FLASHINFER_JIT_DIR",
    "FLASHINFER_LOGDEST", "FLASHINFER_LOGLEVEL", "FLASHINFER_WORKSPACE_BASE",
    "FLASHINFER_WORKSPACE_DIR", "MIOPEN_CACHE_DIR", "MIOPEN_LOG_LEVEL", "MIOPEN_USER_DB_PATH",
    "ONEDNN_VERBOSE", "TRTLLM_LOG_LEVEL",
})  # fmt: skip
"""Of those: where compiled code lies and what is logged."""
MOST_FILES: Final = 10_000
"""In a directory that a setting names."""


def setting_fields(settings: Mapping[str, object], harmless: Collection[str]) -> dict[str, str]:
    """By name, all but ``harmless``. What a file or a directory that a setting names holds is a
    part of the setting."""
    return {name: _text(name, value) for name, value in settings.items() if name not in harmless}


def variable_fields(
    environment: Mapping[str, str],
    registered: Collection[str],
    prefix: str,
    harmless: Collection[str],
) -> dict[str, str]:
    """Variables that are set, of those that the engine or a library below it reads: ``registered``
    and all with the engine's ``prefix``."""
    known = set(registered)
    return {
        name: _text(name, value)
        for name, value in environment.items()
        if (name in known or name.startswith((prefix, *ARITHMETIC)))
        and name not in harmless
        and name not in CACHES
    }


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
    text = json.dumps(plain, sort_keys=True)
    if SECRET.search(name):
        return hashlib.sha256(text.encode()).hexdigest()
    return plain if isinstance(plain, str) and not _is_json(plain) else text


def _is_json(text: str) -> bool:
    """So a text that looks like a number or a list is another setting than that."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _plain(name: str, value: object) -> object:
    """Nothing but what JSON has; the same for the same settings in any process."""
    found: object = value
    match value:
        case Enum():
            found = value.name
        case None | bool() | int() | float():
            pass
        case str() | Path():
            found = f"{value}{_contents(name, str(value))}"
        case Mapping():
            found = {str(key): _plain(name, one) for key, one in value.items()}
        case list() | tuple():
            found = [_plain(name, one) for one in value]
        case set() | frozenset():
            found = sorted(json.dumps(_plain(name, one), sort_keys=True) for one in value)
        case type() | FunctionType() | BuiltinFunctionType():
            found = f"{value.__module__}.{value.__qualname__}"
        case _ if is_dataclass(value):
            found = {
                field.name: _plain(name, getattr(value, field.name)) for field in fields(value)
            }
        case _:  # where that has an address, nothing ever hits
            found = f"{type(value).__qualname__} {value!r}"
    return found


def _contents(name: str, value: str) -> str:
    """What lies where ``value`` points to: empty for anything but a path."""
    try:
        path = Path(value)
        if path.is_file():
            with path.open("rb") as file:
                return f" {hashlib.file_digest(file, 'sha256').hexdigest()}"
        if os.sep in value and path.is_dir():
            return f" {_listing(name, path)}"
    except (OSError, ValueError):  # too long for a path, or has a zero
        return ""
    return ""


def _listing(name: str, directory: Path) -> str:
    """Of names, sizes and times: a directory may hold weights, which take minutes to read."""
    lines: list[str] = []
    for above, _, names in os.walk(directory):
        for file in names:
            stat = (Path(above) / file).lstat()
            lines.append(f"{above}/{file}\0{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}")
        if len(lines) > MOST_FILES:
            where = f"{name} {directory}"
            raise ConfigError(
                f"{where}: holds more than {MOST_FILES:,} files, and no name of a page "
                "can hold them; allowed is a directory with fewer"
            )
    return hashlib.sha256("\0".join(sorted(lines)).encode("utf-8", "surrogatepass")).hexdigest()

"""What another engine computes with, as fields of a name: all of its settings and variables but
those that are known to decide no byte of a page.

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
from collections.abc import Callable, Collection, Mapping
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
ARITHMETIC: Final = (
    "AITER_", "ATEN_", "CK_MOE", "CUBLAS", "CUDNN_", "DG_", "DNNL_", "FLASHINFER_", "HIPBLASLT_",
    "KMP_DETERMINISTIC_REDUCTION", "MIOPEN_", "MKL_", "NCCL_", "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS", "ONEDNN_", "PYTORCH_TUNABLEOP_", "RCCL_", "ROCBLAS_", "ROCM_QUICK_REDUCE_",
    "TORCHINDUCTOR_", "TORCH_ALLOW_TF32", "TORCH_BLAS_", "TORCH_CUDA_ARCH_LIST",
    "TRITON_", "TRTLLM_",
)  # fmt: skip
"""Beginnings of variables by which libraries below the engines choose how to compute."""
CACHES: Final = frozenset({
    "AITER_JIT_DIR", "CUBLASLT_LOG_FILE", "CUBLASLT_LOG_LEVEL", "CUBLAS_LOGDEST_DBG",
    "CUBLAS_LOGINFO_DBG", "DG_JIT_CACHE_DIR", "DG_JIT_DEBUG", "DNNL_VERBOSE",
    "FLASHINFER_CACHE_DIR", "FLASHINFER_DISABLE_VERSION_CHECK",
    "FLASHINFER_JIT_DIR", "FLASHINFER_LOGDEST", "FLASHINFER_LOGLEVEL",
    "FLASHINFER_WORKSPACE_BASE", "FLASHINFER_WORKSPACE_DIR", "HIPBLASLT_LOG_FILE",
    "HIPBLASLT_LOG_LEVEL", "MIOPEN_CACHE_DIR", "MIOPEN_CUSTOM_CACHE_DIR", "MIOPEN_LOG_LEVEL",
    "MKL_VERBOSE", "MKL_VERBOSE_OUTPUT_FILE", "NCCL_DEBUG", "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_SUBSYS", "ONEDNN_VERBOSE",
    "ROCBLAS_LOG_BENCH_PATH", "ROCBLAS_LOG_PATH", "ROCBLAS_LOG_PROFILE_PATH",
    "ROCBLAS_LOG_TRACE_PATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_DUMP_DIR",
    "TRTLLM_LOG_LEVEL",
})  # fmt: skip
"""Of those: where compiled code is kept, which grows while an engine runs, and what is logged. A
library keeps code under names of what it was made from. Databases of tuned choices are not here,
nor compilers and what they compile for."""
TOOLKITS: Final = frozenset({"CUDA_HOME", "CUDA_PATH"})
"""Variables that name a directory of compilers, too large to list: of those below it that make
kernels while an engine runs, every byte counts."""
COMPILERS: Final = ("bin/nvcc", "bin/ptxas", "nvvm/bin/cicc")
NO_PATH: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})
"""Errors that say that a text is no path of this machine."""
MOST_FILES: Final = 10_000
"""And directories, in a directory that a setting names."""


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
    known = {*registered, *TOOLKITS}
    return {
        name: _compilers(name, value) if name in TOOLKITS else _text(name, value)
        for name, value in environment.items()
        if (name in known or name.startswith((prefix, *ARITHMETIC)))
        and name not in harmless
        and name not in CACHES
    }


def _compilers(name: str, directory: str) -> str:
    found = (f" {one}{_contents(name, f'{directory}/{one}')}" for one in COMPILERS)
    return directory + "".join(found)


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
            found = f"{_without_secrets(str(value))}{_contents(name, str(value))}"
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


def _contents(name: str, value: str) -> str:
    """What lies where ``value`` points to: empty for anything but a path. ConfigError for what is
    there and cannot be read."""
    try:
        status = os.stat(value)  # Path("") is a directory, and "" is none
    except ValueError:  # has a zero
        return ""
    except OSError as error:
        if error.errno in NO_PATH:
            return ""
        _refuse(name, value, error)
    try:
        if stat.S_ISREG(status.st_mode):
            with Path(value).open("rb") as file:
                return f" {hashlib.file_digest(file, 'sha256').hexdigest()}"
        if stat.S_ISDIR(status.st_mode):
            return f" {listing(name, value)}"
    except OSError as error:
        _refuse(name, value, error)
    if stat.S_ISFIFO(status.st_mode):
        _refuse(name, value, OSError(errno.ESPIPE, "it is a pipe"))
    return f" {stat.S_IFMT(status.st_mode):o} {status.st_rdev}"  # a device, or a socket


def _refuse(name: str, value: str, error: OSError) -> NoReturn:
    where, reason = _where(name, value), error.strerror
    if error.filename not in {None, value} and not _is_secret(name):
        reason = f"{error.filename}: {reason}"
    raise ConfigError(
        f"{where}: cannot be read ({reason}), and no name of a page can hold it; allowed is a file "
        "or a directory of which everything can be read, or what is no path"
    ) from None


def _where(name: str, value: str) -> str:
    return name if _is_secret(name) else f"{name} {value}"


def listing(name: str, directory: str, without: Callable[[str], bool] = lambda _: False) -> str:
    """Of names, sizes and times: a directory may hold weights, which take minutes to read. Of a
    link, those of what it points to, and where that is: a snapshot of a hub is made of links.
    ``without``: files and directories that do not count, by their own names. OSError for what
    cannot be read; ConfigError, under ``name``, for more than ``MOST_FILES``."""
    lines: list[str] = []
    seen = {_place(os.stat(directory))}
    for above, below, names in os.walk(directory, onerror=_raise, followlinks=True):
        new: list[str] = []
        for one in sorted(
            one for one in below if not without(one)
        ):  # which of two links to one directory is the first
            path = os.path.join(above, one)
            place = _place(os.stat(path))
            lines.append(f"{path}/\0{os.path.realpath(path)}")
            if place not in seen:  # else a link leads round
                seen.add(place)
                new.append(one)
        below[:] = new
        lines += [_line(os.path.join(above, one)) for one in names if not without(one)]
        if len(lines) > MOST_FILES:
            where = _where(name, directory)
            raise ConfigError(
                f"{where}: holds more than {MOST_FILES:,} files and directories, "
                "and no name of a page can hold them; allowed is a directory with fewer"
            )
    return hashlib.sha256("\0".join(sorted(lines)).encode("utf-8", "surrogatepass")).hexdigest()


def _line(path: str) -> str:
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

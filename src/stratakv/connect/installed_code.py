"""Whose code computes, beside the engine's own release: every installed package, and the processor.

Owns how what is installed becomes fields of a name. A package is its release and the digests of its
files that its installer wrote down: another build of one release is another package. Of one that is
used where it is edited, the names, sizes and times of the files there that compute or are computed
with. Must not import a package.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from stratakv.connect.native_code import LIBRARY
from stratakv.connect.whole_settings import code_listing

HARMLESS: Final = frozenset({
    # What stores and fetches pages has formats of its own, with numbers.
    "stratakv",
    # Installers, certificates and clients.
    "certifi", "charset-normalizer", "h11", "httpcore", "httptools", "httpx", "idna", "pip",
    "requests", "urllib3", "uv", "wheel",
    # Servers, logs and counters.
    "anyio", "fastapi", "opentelemetry-api", "opentelemetry-sdk", "prometheus-client",
    "prometheus-fastapi-instrumentator", "rich", "sentry-sdk", "sse-starlette", "starlette",
    "tqdm", "uvicorn", "uvloop", "watchfiles", "websockets",
})  # fmt: skip
"""Packages that no forward calls. Where in doubt, one is not here."""
CODE: Final = re.compile(
    r"\.(py[xid]?|pth|so(\..*)?|dylib|dll|c|cc|cpp|cxx|h|hh|hpp|hxx|inc|inl|cl|cu|cuh|hip|metal|S|asm"
    r"|ptx|cubin|fatbin|hsaco|co|bc|ll|mlir|spv|wasm|jinja|j2|in|json|jsonl|ya?ml|toml|cfg|ini|csv"
    r"|npy|npz|pt|pkl|bin|dat|db|safetensors)$"
)
"""Of an edited package, files by their names: what runs, what kernels are made from, and tables.
Not what people read, nor logs."""
BUILT: Final = "build"
"""Beside an edited package: copies, of which some builders have only the libraries imported."""
BESIDE: Final = frozenset({"dist", "docs", "tests"})
"""Directories beside an edited package; one further down may be a part of it."""
FEATURES: Final = ("model name", "flags", "Features", "CPU implementer", "CPU part")
"""What the kernel says of a processor that libraries choose kernels by."""


@cache
def installed_packages() -> Mapping[str, str]:
    """Of this process, which goes on with what it has imported whatever is installed later."""
    return package_fields(distributions())


def installed_fields(devices: Sequence[str]) -> dict[str, str]:
    """``devices``: names of those that compute, of the ranks of one page; none, or "cpu", for the
    processor of this machine."""
    if set(devices) - {"cpu"}:
        return {"devices": json.dumps(devices), **installed_packages()}
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return {**processor_fields(text, usable_cores()), **installed_packages()}


def usable_cores() -> int:
    """Among which this process may run; of a system that does not say, all."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def package_fields(installed: Iterable[Distribution]) -> dict[str, str]:
    """By package; of several of one name all, the one that is imported first. pip may leave an old
    one behind, which can come before the one that is imported; without a name, it is none."""
    found: dict[str, str] = {}
    for package in installed:
        if (given := _field(package, "Name")) is None:
            continue
        name = given.lower().replace("_", "-")
        if name not in HARMLESS:
            field = f"package {name}"
            found[field] = (
                f"{found[field]}, {_package(package)}" if field in found else _package(package)
            )
    return found


def processor_fields(cpuinfo: str, cores: int) -> dict[str, str]:
    """Where a CPU computes. ``cpuinfo``: as Linux gives it. ``cores``: that the process may use,
    among which sums are divided."""
    lines = {line for line in cpuinfo.splitlines() if line.partition(":")[0].strip() in FEATURES}
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
    return {"processor": f"{digest[:16]}, {cores} cores"}


def _field(package: Distribution, name: str) -> str | None:
    """Of its metadata; asked for without looking, what is absent warns, and will raise."""
    fields = package.metadata
    if name not in fields:
        return None
    return fields[name]


def _package(package: Distribution) -> str:
    parts = [_field(package, "Version") or ""]
    written = [
        line
        for line in (package.read_text("RECORD") or "").splitlines()
        # Scripts name the environment's directory; what the installer notes, where it is from.
        if ",sha256=" in line and not line.startswith("..") and ".dist-info/" not in line
    ]
    if written:
        parts.append(hashlib.sha256("\n".join(sorted(written)).encode()).hexdigest()[:16])
    origin = json.loads(package.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        where = unquote(urlsplit(origin["url"]).path)
        digest = code_listing(f"package {package.name}", where, _is_entered, _is_code)
        parts.append(f"edited {digest[:16]}")
    return " ".join(parts)


def _is_entered(path: str) -> bool:
    """A directory of an edited package, by its path there."""
    name = os.path.basename(path)
    changes = name.startswith(".") or name == "__pycache__" or name.endswith(".egg-info")
    return not changes and path not in BESIDE


def _is_code(path: str) -> bool:
    top, _, below = path.partition(os.sep)
    name = os.path.basename(path)
    if below and top == BUILT:
        return LIBRARY.search(name) is not None
    return not name.startswith(".") and CODE.search(name) is not None

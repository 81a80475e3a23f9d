"""Whose code computes, beside the engine's own release: every installed package, and the processor.

Owns how what is installed becomes fields of a name. A package is its release and the digests of its
files that its installer wrote down: another build of one release is another package. Of one that is
used where it is edited, the names, sizes and times of all files there. Must not import a package.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from stratakv.connect.whole_settings import listing

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
UNUSED: Final = frozenset({"__pycache__"})
"""Directories of an edited package that running it changes, beside those that are hidden."""
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
    return {**processor_fields(text, len(os.sched_getaffinity(0))), **installed_packages()}


def package_fields(installed: Iterable[Distribution]) -> dict[str, str]:
    """By package; of several of one name the first, which is the one that is imported."""
    found: dict[str, str] = {}
    for package in installed:
        name = package.name.lower().replace("_", "-")
        if name not in HARMLESS:
            found.setdefault(f"package {name}", _package(package))
    return found


def processor_fields(cpuinfo: str, cores: int) -> dict[str, str]:
    """Where a CPU computes. ``cpuinfo``: as Linux gives it. ``cores``: that the process may use,
    among which sums are divided."""
    lines = {line for line in cpuinfo.splitlines() if line.partition(":")[0].strip() in FEATURES}
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
    return {"processor": f"{digest[:16]}, {cores} cores"}


def _package(package: Distribution) -> str:
    parts = [package.version]
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
        parts.append(f"edited {listing(f'package {package.name}', where, _is_no_code)[:16]}")
    return " ".join(parts)


def _is_no_code(name: str) -> bool:
    return name.startswith(".") or name in UNUSED

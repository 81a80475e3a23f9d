"""Shared libraries and compilers that a process finds by variables, and no package brings.

Owns where the dynamic linker and builders of kernels look. Libraries and compilers count by every
byte, and not by times, which another machine with the same image does not share. Must not know
which variables an engine reads.
"""

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from stratakv.connect.whole_settings import contents, refuse

LIBRARY_PATHS: Final = frozenset({"LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"})
"""Variables that list directories in which libraries are found before all other places."""
PRELOADED: Final = frozenset({"LD_PRELOAD", "DYLD_INSERT_LIBRARIES"})
"""Variables that list libraries whose functions come before everybody's."""
TOOLKITS: Final = frozenset({"CUDA_HOME", "CUDA_PATH"})
"""Variables that name a directory of compilers, too large to list: of those below it that make
kernels while an engine runs, every byte counts."""
COMPILERS: Final = ("bin/nvcc", "bin/ptxas", "nvvm/bin/cicc")
"""Of a toolkit."""
USUAL_TOOLKIT: Final = "/usr/local/cuda"
"""Where builders of kernels look if nobody says where."""
HOST_COMPILERS: Final = ("g++", "c++", "gcc", "cc", "clang++", "clang")
"""What builders of kernels for a processor look for in the path, Inductor's among them, and
Triton's and tvm-ffi's for what calls a kernel. Not assemblers and linkers, which choose no
arithmetic."""
CHOSEN: Final = ("CXX", "CC")
"""Variables that name another, by path or to be looked for, with words around it."""
BEHIND: Final = ("lib*/gcc/*/*/cc1plus", "lib*/gcc/*/*/cc1")
"""Beside the ``bin`` of a GCC, whose programs in the path only call these."""
LIBRARY: Final = re.compile(r"\.so(\.|$)|\.dylib$")
_PROCESSORS: Final = "glibc-hwcaps"
"""Below a directory of libraries, others for better processors, which glibc takes first."""


def native_field(name: str, value: str) -> str | None:
    """The text of a variable with what it leads to; None where it is not of those above.
    ConfigError for what is there and cannot be read."""
    if name in LIBRARY_PATHS:
        # An empty entry is the working directory; of an empty variable there is no entry.
        entries = re.split("[:;]", value) if value else []
        return ":".join(f"{entry}{_libraries(name, entry or '.')}" for entry in entries)
    if name in PRELOADED:
        entries = re.split("[: ]", value)
        return ":".join(f"{entry}{contents(name, entry)}" for entry in entries if entry)
    return _compilers(name, value) if name in TOOLKITS else None


def compiler_fields(
    environment: Mapping[str, str], usual: str = USUAL_TOOLKIT
) -> Mapping[str, str]:
    """Compilers that are found where no variable names a toolkit; empty where one does, or where
    there are none. ``usual``: counts also beside an ``nvcc`` of the path, which may be a script
    that calls the one there."""
    if any(environment.get(name) for name in TOOLKITS):
        return {}
    places = [usual]
    if (nvcc := shutil.which("nvcc", path=environment.get("PATH", os.defpath))) is not None:
        places.insert(0, str(Path(nvcc).resolve().parent.parent))
    there = [place for place in places if any(Path(place, one).exists() for one in COMPILERS)]
    if not there:
        return {}
    return {"compilers": ":".join(_compilers("CUDA_HOME", place) for place in there)}


def host_compiler_fields(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Every byte of the compilers for processors that can be found, not of the first alone, which
    may be a script that calls another; empty where there are none. Not where they lie, but in which
    order."""
    chosen = [word for name in CHOSEN for word in environment.get(name, "").split()]
    programs = list(dict.fromkeys(_programs([*chosen, *HOST_COMPILERS], environment)))
    behind = dict.fromkeys(
        one
        for program in programs
        for pattern in BEHIND
        for one in sorted(program.parent.parent.glob(pattern))
    )
    found = (f"{one.name}{_program_bytes(one)}" for one in [*programs, *behind])
    return {"host_compilers": " ".join(found)} if programs else {}


def _programs(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[Path]:
    """What is run for these, links followed, in the order of the path."""
    places = environment.get("PATH", os.defpath).split(os.pathsep)
    for word in words:
        for place in [""] if os.path.dirname(word) else places:
            program = shutil.which(os.path.join(place or ".", word))
            if program is not None:
                yield Path(program).resolve()


def _program_bytes(program: Path) -> str:
    status = program.stat()
    times = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return _once_read(str(program), times)


@cache
def _once_read(path: str, times: tuple[int, ...]) -> str:
    """Compilers are large, and a process may make several back ends. ``times``: of the file."""
    del times
    return contents("PATH", path)


def _compilers(name: str, directory: str) -> str:
    found = (f" {one}{contents(name, f'{directory}/{one}')}" for one in COMPILERS)
    return directory + "".join(found)


def _libraries(name: str, directory: str) -> str:
    """Of those that lie directly in a directory, names and bytes. Empty for what is no directory,
    or one that neither we nor the linker may enter."""
    if not os.path.isdir(directory) or not os.access(directory, os.X_OK):
        return ""
    digests: dict[tuple[int, int], str] = {}  # most of them have three names
    parts = hashlib.sha256()
    try:
        for path in sorted(_library_paths(directory)):
            status = os.stat(path)
            place = status.st_dev, status.st_ino
            if stat.S_ISREG(status.st_mode):
                if place not in digests:
                    digests[place] = contents(name, path)
                line = f"{os.path.relpath(path, directory)}\0{digests[place]}\0"
                parts.update(line.encode("utf-8", "surrogatepass"))
    except OSError as error:
        refuse(name, directory, error)
    return f" {parts.hexdigest()}"


def _library_paths(directory: str) -> Iterator[str]:
    """Of what we may read, and so the linker."""
    better = os.path.join(directory, _PROCESSORS)
    kinds = os.listdir(better) if os.path.isdir(better) else []
    for place in (directory, *(os.path.join(better, kind) for kind in kinds)):
        for one in os.listdir(place) if os.path.isdir(place) else ():
            path = os.path.join(place, one)
            if LIBRARY.search(one) and os.access(path, os.R_OK):
                yield path

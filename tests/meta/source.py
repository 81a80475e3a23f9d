"""The repository as text and syntax trees. Owns what the meta tests look at; judges nothing."""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = ROOT / "src" / "stratakv"


@dataclass(frozen=True)
class Module:
    """``name`` is the path inside the package: ``tree/nodes.py``."""

    name: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return _parsed(self.text)

    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        nodes = ast.walk(self.tree)
        return [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        """Every call, with the last part of the called name: ``a.b.f(x)`` is ``f``."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield last_name(node.func), node


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


@cache
def modules() -> tuple[Module, ...]:
    """Every Python file of the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 50, "the package is not where the meta tests look for it"
    return tuple(Module(f.relative_to(PACKAGE).as_posix(), f.read_text("utf-8")) for f in files)


@cache
def repository() -> tuple[tuple[str, str], ...]:
    """(path, text) of every text file that git tracks, or would if it were added."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=False,
    )  # fmt: skip
    if listed.returncode:  # an unpacked archive: everything in it was tracked
        skipped = {".venv", "build", "__pycache__", ".git"}
        found = [f.relative_to(ROOT) for f in ROOT.rglob("*") if f.is_file()]
        names = [f.as_posix() for f in found if not skipped & set(f.parts)]
    else:
        names = [name for name in listed.stdout.decode().split("\0") if name]
    files = [(name, (ROOT / name).read_bytes()) for name in names if (ROOT / name).is_file()]
    return tuple((name, data.decode()) for name, data in files if b"\0" not in data[:8192])

"""Names in the code and its tests: the field's words, and one name for one thing, on samples."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tests.meta.source import Module, modules, repository

VAGUE = frozenset({
    "say", "says", "said", "saying", "tell", "tells", "told", "untold", "telling", "speak",
    "speaks", "spoken", "hear", "hears", "heard", "news",
})  # fmt: skip
"""A status is returned, an event reported, an observer notified, an output chosen or generated."""
PLAIN = frozenset({"say", "says"})
LOOKUPS = frozenset({"find", "finds", "found", "finding", "findings"})
"""Not of a class, a function, an attribute or a constant: a table is looked up, a check has
results. A local variable may hold what was found."""
COUNTED = {
    "policy/prefetch_book.py": "the label of a metric: tokens that storage was found to have",
    "policy/prefetch_reasons.py": "the same",
}
OLD = frozenset({
    "booking", "desk", "doom", "hazards", "heed", "letter", "letters", "meeting", "meetings",
    "mischief", "parking", "parked", "patrol", "seat", "seats", "seating", "stray", "strays",
    "testify", "wish", "witness",
})  # fmt: skip
"""Words of ours for which the field has others: request, limits, broadcast, collective, retracted,
admission, duplicate, deleted, fault, check."""


def words_of(name: str) -> set[str]:
    """``_heard_by`` and ``HeardBy``: heard and by."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


def names_of(module: Module) -> Iterator[tuple[int, str]]:
    """What a module names, by line: not what it only uses, which others have named."""
    for node in ast.walk(module.tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case (
                ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name))
            ):  # fmt: skip
                yield node.lineno, name
            case _:
                pass


def vague_names(module: Module) -> list[str]:
    """The name of a test is a sentence, which may say that something says what it says."""
    return [
        f"line {line}: {name}"
        for line, name in names_of(module)
        if words_of(name) & ((VAGUE | OLD) - (PLAIN if name.startswith("test_") else frozenset()))
    ]


def lasting_names(module: Module) -> Iterator[tuple[int, str]]:
    """Those that others read: of classes, functions, attributes, fields and constants."""
    for scope in ast.walk(module.tree):
        match scope:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield scope.lineno, scope.name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield scope.lineno, name
            case ast.ClassDef(body=body) | ast.Module(body=body):
                if isinstance(scope, ast.ClassDef):
                    yield scope.lineno, scope.name
                for node in body:
                    match node:
                        case ast.AnnAssign(target=ast.Name(id=name)):
                            yield node.lineno, name
                        case ast.Assign(targets=[ast.Name(id=name), *_]):
                            yield node.lineno, name
                        case _:
                            pass
            case _:
                pass


def lookup_names(module: Module) -> list[str]:
    return [f"line {line}: {name}" for line, name in lasting_names(module)
            if words_of(name) & LOOKUPS]  # fmt: skip


def types_of(module: Module) -> Iterator[tuple[str, bool]]:
    """Public names of classes, and of aliases of types, at the top of a module; whether a class."""
    for node in module.tree.body:
        match node:
            case ast.ClassDef(name=name):
                public, is_class = name, True
            case (
                ast.AnnAssign(target=ast.Name(id=name))
                | ast.Assign(targets=[ast.Name(id=name), *_])
            ):
                public, is_class = name, False
            case _:
                continue
        if public[0].isupper() and (is_class or not public.isupper()):
            yield public, is_class


def shared_names(package: Iterable[Module]) -> dict[str, list[str]]:
    """Where a name stands for a class, and for another type elsewhere. Aliases alone may share one:
    ``Flags`` is an array of bool wherever it is."""
    owners: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for module in package:
        for name, is_class in types_of(module):
            owners[name].append((module.name, is_class))
    return {
        name: [module for module, _ in where]
        for name, where in owners.items()
        if len(where) > 1 and any(is_class for _, is_class in where)
    }


def test_no_name_is_built_on_what_somebody_says():
    everywhere = [Module(name, text) for name, text in repository() if name.endswith(".py")]
    assert len(everywhere) > len(modules()) + 100, "the tests are not where this looks for them"
    assert {m.name: vague_names(m) for m in everywhere if vague_names(m)} == {}


def test_a_vague_name_is_seen():
    for sample in (
        "def heard_by(rank): pass", "class UntoldFault: pass", "def f(news): pass", "said = 1",
        "self._news = []", "match x:\n    case told: pass", "class A:\n    told: int = 0",
    ):  # fmt: skip
        assert vague_names(Module("sample.py", sample)), sample
    fine = "def f(newspaper, essay, status):\n    told.append(status)  # said"
    assert not vague_names(Module("sample.py", fine))


def test_what_lasts_is_not_named_after_how_it_was_come_by():
    for sample in (
        "def find(key): pass", "class Findings: pass", "class A:\n    found: int", "FOUND = 1",
        "class A:\n    def f(self): self._found = 1", "def f():\n    def found(): pass",
    ):  # fmt: skip
        assert lookup_names(Module("sample.py", sample)), sample
    fine = "def f(found, text):\n    found = text.find('x')\n    return found"
    assert not lookup_names(Module("sample.py", fine))
    named = {m.name: lookup_names(m) for m in modules() if lookup_names(m)}
    assert {name: what for name, what in named.items() if name not in COUNTED} == {}
    assert named.keys() >= COUNTED.keys(), "no exceptions any more"


def test_a_class_shares_its_name_with_no_other():
    assert shared_names(modules()) == {}


def test_a_shared_name_is_seen():
    one = Module("one.py", "class Place: pass\nclass _Own: pass\nFlags: TypeAlias = X\n")
    two = Module("two.py", "class Place: pass\nclass _Own: pass\nFlags = X\nPLACE = 1\n")
    three = Module("three.py", "Place: TypeAlias = tuple[int, int]\n")
    assert shared_names([one, two]) == {"Place": ["one.py", "two.py"]}
    assert shared_names([two, three]) == {"Place": ["two.py", "three.py"]}
    assert shared_names([one]) == shared_names([three]) == {}

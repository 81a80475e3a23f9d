"""One name, one thing: a class of the package shares its name with no other. Shown on a sample."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tests.meta.source import Module, modules


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


def test_a_class_shares_its_name_with_no_other():
    assert shared_names(modules()) == {}


def test_a_shared_name_is_seen():
    one = Module("one.py", "class Place: pass\nclass _Own: pass\nFlags: TypeAlias = X\n")
    two = Module("two.py", "class Place: pass\nclass _Own: pass\nFlags = X\nPLACE = 1\n")
    three = Module("three.py", "Place: TypeAlias = tuple[int, int]\n")
    assert shared_names([one, two]) == {"Place": ["one.py", "two.py"]}
    assert shared_names([two, three]) == {"Place": ["two.py", "three.py"]}
    assert shared_names([one]) == shared_names([three]) == {}

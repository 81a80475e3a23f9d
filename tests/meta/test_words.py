"""What no file may say, and what every module must. Every rule is shown to bite on a sample."""

import ast
import re
from collections.abc import Callable

import pytest

from tests.meta.source import Module, modules, repository

UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX|NotImplemented" + r"Error)\b")
# Character classes keep these patterns from matching this file.
MACHINE = re.compile(r"(?<![\w.])/[w]ork/|/tmp/[w]/|/home/[a]|/opt/[pw]|(?<![\w-])shared[/]\w")
REGISTRY = re.compile(r"[p]ypi\.|python[h]osted|[n]pmjs|[p]ytorch\.org/whl|-index-url[ =]+[h]ttp")


def guessed_attributes(module: Module) -> list[str]:
    """``hasattr`` and a default for ``getattr`` hide what a type should say."""
    return [
        f"line {call.lineno}: {name}"
        for name, call in module.calls()
        if name == "hasattr" or (name == "getattr" and len(call.args) == 3)
    ]


def unfinished(module: Module) -> list[str]:
    return UNFINISHED.findall(module.text)


def no_owner(module: Module) -> list[str]:
    """An ``__init__`` is empty; every other module says first what it owns."""
    docstring = ast.get_docstring(module.tree) or ""
    if module.name.endswith("__init__.py"):
        return [] if len(module.text.splitlines()) <= 1 else ["holds code"]
    return [] if re.search(r"\bowns\b", docstring, re.IGNORECASE) else ["does not say what it owns"]


def foreign_paths(module: Module) -> list[str]:
    return MACHINE.findall(module.text)


def registries(module: Module) -> list[str]:
    return REGISTRY.findall(module.text)


SAMPLES: dict[Callable[[Module], list[str]], tuple[str, ...]] = {
    guessed_attributes: ("if hasattr(x, 'y'): pass", "getattr(x, 'y', None)"),
    unfinished: ("# TO" + "DO: later", "raise NotImplemented" + "Error"),
    no_owner: ('"""Reads a file."""', "import os"),
    foreign_paths: ('open("/wo' + 'rk/x")', "# see ../sha" + "red/design", "/tm" + "p/w/x"),
    registries: ("https://py" + "pi.org/simple", "--extra-index-url " + "http://host"),
}
FINE = {
    guessed_attributes: "getattr(x, name)",
    unfinished: '"""The method is done."""',
    no_owner: '"""Reads a file. Owns the handle."""',
    foreign_paths: 'Path("src/work/shared.py")',
    registries: "PIP_EXTRA_INDEX_URL",
}
OF_PACKAGE = (guessed_attributes, unfinished, no_owner)


@pytest.mark.parametrize("rule", SAMPLES, ids=lambda rule: rule.__name__)
def test_a_sample_breaks_the_rule(rule):
    for sample in SAMPLES[rule]:
        assert rule(Module("sample.py", sample)), sample
    assert not rule(Module("sample.py", FINE[rule]))


@pytest.mark.parametrize("rule", OF_PACKAGE, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule):
    assert not {m.name: rule(m) for m in modules() if rule(m)}


@pytest.mark.parametrize("rule", [foreign_paths, registries], ids=lambda rule: rule.__name__)
def test_no_file_of_the_repository_names_a_machine_or_a_registry(rule):
    files = repository()
    assert len(files) > 100
    found = {name: rule(Module(name, text)) for name, text in files}
    assert not {name: what for name, what in found.items() if what}


def test_no_file_of_the_repository_is_left_unfinished():
    code = [(name, text) for name, text in repository() if name.endswith((".py", ".c", ".md"))]
    assert not {name: unfinished(Module(name, text)) for name, text in code
                if unfinished(Module(name, text))}  # fmt: skip

"""Nothing grows past what one can hold in the head. Every rule is shown to bite on a sample."""

import ast
from collections.abc import Callable

import pytest

from tests.meta.source import Module, last_name, modules

FILE_LINES = 400
FUNCTION_LINES = 60
PARAMETERS = 7
VERBS = 6
PUBLIC = 20
"""Public methods of a class, its properties too; the tests of a suite are no verbs."""
WIDE = {
    "testing/tree_machine.py: TreeMachine": "a rule of Hypothesis for each thing that can happen",
    "testing/tree_model.py: TreeModel": "all that a tree answers, once more in the plainest way",
}
"""Classes that may have more, and why."""


def long_file(module: Module) -> list[str]:
    lines = len(module.text.splitlines())
    return [f"{lines} lines"] if lines > FILE_LINES else []


def is_a_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Of Triton's: a launch has no records, so each pointer, stride and size is an argument."""
    return any(ast.unparse(mark) == "triton.jit" for mark in function.decorator_list)


def long_functions(module: Module) -> list[str]:
    first = {f.name: f.body[0].lineno if is_a_kernel(f) else f.lineno for f in module.functions()}
    sizes = {f.name: (f.end_lineno or 0) - first[f.name] + 1 for f in module.functions()}
    return [f"{name}: {n} lines" for name, n in sizes.items() if n > FUNCTION_LINES]


def many_parameters(module: Module) -> list[str]:
    found = []
    for function in module.functions():
        if is_a_kernel(function):
            continue
        arguments = function.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if names[:1] in (["self"], ["cls"]):
            names = names[1:]
        if len(names) > PARAMETERS:
            found.append(f"{function.name}: {len(names)} parameters")
    return found


def wide_protocols(module: Module) -> list[str]:
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and "Protocol" in map(last_name, node.bases):
            verbs = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            if len(verbs) > VERBS:
                found.append(f"{node.name}: {len(verbs)} verbs")
    return found


def wide_classes(module: Module) -> list[str]:
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            parts = [p for p in node.body if isinstance(p, ast.FunctionDef | ast.AsyncFunctionDef)]
            verbs = [part for part in parts if not part.name.startswith(("_", "test_"))]
            if len(verbs) > PUBLIC:
                found.append(node.name)
    return found


VERB = "    def v{}(self): ...\n"
SAMPLES: dict[Callable[[Module], list[str]], str] = {
    long_file: "\n" * 401,
    long_functions: "def f():\n" + "    pass\n" * 60,
    many_parameters: "def f(self, a, b, c, d, /, e, *, f, g, h): pass",
    wide_protocols: "class P(Protocol):\n" + "".join(map(VERB.format, range(7))),
    wide_classes: "class C:\n" + "".join(map(VERB.format, range(21))),
}
FINE = {
    long_file: "\n" * 400,
    long_functions: "def f():\n" + "    pass\n" * 59,
    many_parameters: "def f(self, a, b, c, d, /, e, *, f, g): pass\n"
    "@triton.jit\ndef k(a, b, c, d, e, f, g, h): pass",
    wide_protocols: "class P(Protocol):\n" + "".join(map(VERB.format, range(6))),
    wide_classes: "class C:\n" + "".join(map(VERB.format, range(20))) + "    def _v(self): ...\n",
}


@pytest.mark.parametrize("rule", SAMPLES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_limit_and_a_sample_breaks_it(rule):
    assert rule(Module("sample.py", SAMPLES[rule]))
    assert not rule(Module("sample.py", FINE[rule]))
    broken = [f"{module.name}: {what}" for module in modules() for what in rule(module)]
    allowed = WIDE if rule is wide_classes else {}
    assert broken == sorted(allowed)

"""The mutants of a source file: mutmut's operators, and two of our own, over its syntax tree.

Owns what is mutated and how a mutant is called. Must not import what it mutates.
"""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

try:
    import libcst as cst
    import libcst.matchers as m
    from libcst.metadata import MetadataWrapper, PositionProvider
    from mutmut.mutation import mutators
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error}: `make mutants` or `pip install -e '.[mutants]'` installs it"
    ) from error

UNTOUCHED_CALLS: Final = {
    "len", "isinstance", "assert_never", "cast", "TypeVar", "NewType", "getLogger",
}  # fmt: skip
UNTOUCHED: Final = (
    m.Annotation()
    | m.Decorator()
    | m.Import()
    | m.ImportFrom()
    | m.Expr(m.SimpleString() | m.ConcatenatedString())  # docstrings
    | m.Call(func=m.Attribute(value=m.Name("_logger")))  # nobody compares what the log says
    | m.Arg(keyword=m.Name("strict"))
    | m.Raise()  # the words of an error
    | m.AnnAssign(annotation=m.Annotation(m.Name("TypeAlias")))
)


@dataclass(frozen=True, slots=True, eq=False)
class Mutant:
    """``function``: its qualified name, that of a class, or "" for a module's own lines. ``lines``:
    of the statement that is mutated. ``swappable``: only the body of a function differs."""

    path: Path
    function: str
    text: str
    lines: range
    swappable: bool
    module: cst.Module
    node: cst.CSTNode
    mutated: cst.CSTNode

    def source(self) -> str:
        """The whole file, with this mutation."""
        changed = self.module.deep_replace(self.node, self.mutated)
        assert isinstance(changed, cst.Module)
        return changed.code


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _left_out(node: cst.Expr) -> Iterable[cst.CSTNode]:
    """A call that is a statement of its own: what is never released, freed, told, counted."""
    if m.matches(node.value, m.Call()) and not m.matches(node.value.func, m.Name("assert_never")):
        yield cst.Pass()


def _negated(node: cst.If | cst.While | cst.CompIf) -> Iterable[cst.CSTNode]:
    """A condition without an operator that mutmut would replace."""
    if m.matches(node.test, m.Name() | m.Attribute() | m.Call() | m.Subscript()):
        yield node.with_changes(test=cst.UnaryOperation(cst.Not(), node.test))


def _fewer_arguments(node: cst.Call) -> Iterable[cst.CSTNode]:
    """None for each argument, and without each that has a name, so that its default is used."""
    for i, argument in enumerate(node.args):
        if argument.keyword is not None and argument.keyword.value == "strict":
            continue  # of a zip whose sides are as long by construction
        if not argument.star and not m.matches(argument.value, m.Name("None")):
            changed = argument.with_changes(value=cst.Name("None"))
            yield node.with_changes(args=[*node.args[:i], changed, *node.args[i + 1 :]])
        if argument.keyword is not None:
            yield node.with_changes(args=[*node.args[:i], *node.args[i + 1 :]])


def _other_string(node: cst.SimpleString) -> Iterable[cst.CSTNode]:
    yield from list(mutators.operator_string(node))[:1]  # those in other letters say no more


def _fewer_cases(node: cst.Match) -> Iterable[cst.CSTNode]:
    for i, case in enumerate(node.cases):
        if not m.findall(case.body, m.Call(func=m.Name("assert_never"))):
            yield node.with_changes(cases=[*node.cases[:i], *node.cases[i + 1 :]])


OURS: Final = {
    mutators.operator_arg_removal: _fewer_arguments,
    mutators.operator_string: _other_string,
    mutators.operator_match: _fewer_cases,
}
OPERATORS: Final = [
    *((kind, OURS.get(operator, operator)) for kind, operator in mutators.mutation_operators),
    (cst.Expr, _left_out),
    (cst.If, _negated),
    (cst.While, _negated),
    (cst.CompIf, _negated),
]


class _Visitor(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, path: Path, module: cst.Module) -> None:
        super().__init__()
        self.found: list[Mutant] = []
        self._path, self._module = path, module
        self._stack: list[cst.CSTNode] = []
        self._seen: Counter[tuple[str, str]] = Counter()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if self._untouched(node):
            return False
        self._stack.append(node)
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                for mutated in operator(node):
                    self._add(node, mutated)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if self._stack and self._stack[-1] is original_node:
            self._stack.pop()

    def _untouched(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Name):
            return node.func.value in UNTOUCHED_CALLS
        parent = self._stack[-1] if self._stack else None
        if isinstance(parent, cst.Assert) and node is parent.msg:
            return True
        if isinstance(node, cst.SimpleString) and any(
            isinstance(n, cst.Raise) for n in self._stack
        ):
            return True  # the words of an error
        if isinstance(parent, cst.Param) and node is not parent.default:
            return True
        if isinstance(node, cst.Expr) and m.matches(
            node.value, m.Call(func=m.Attribute(value=m.Name("_logger")))
        ):
            return True
        return m.matches(node, UNTOUCHED)

    def _add(self, node: cst.CSTNode, mutated: cst.CSTNode) -> None:
        scope = [n for n in self._stack if isinstance(n, cst.FunctionDef | cst.ClassDef)]
        names: list[str] = []
        function: cst.FunctionDef | None = None
        for part in scope:
            names.append(part.name.value)
            if isinstance(part, cst.FunctionDef):
                function = part
                break
        statement = next(
            n for n in reversed([*self._stack]) if isinstance(n, _STATEMENT) or n is self._module
        )
        before, after = _headline(self._module, statement), ""
        if statement is node:
            after = _headline(self._module, mutated)
        else:
            changed = statement.deep_replace(node, mutated)
            assert isinstance(changed, cst.CSTNode)
            after = _headline(self._module, changed)
        name, text = ".".join(names), f"{before} => {after}"
        self._seen[name, text] += 1
        if self._seen[name, text] > 1:
            text += f" ({self._seen[name, text]})"
        position = self.get_metadata(PositionProvider, statement)
        own = self.get_metadata(PositionProvider, node)
        header = isinstance(statement, cst.BaseCompoundStatement | cst.MatchCase)
        last = own.end.line if header and not isinstance(node, cst.Match) else position.end.line
        if isinstance(node, cst.If | cst.While | cst.Match):
            last = position.start.line
        lines = range(position.start.line, last + 1)
        swappable = function is not None and statement is not function
        self.found.append(
            Mutant(self._path, name, text, lines, swappable, self._module, node, mutated)
        )


_STATEMENT: Final = (
    cst.BaseSmallStatement | cst.BaseCompoundStatement | cst.MatchCase | cst.ExceptHandler
)


def _headline(module: cst.Module, node: cst.CSTNode) -> str:
    """A statement on one line, a compound one without what it is the head of."""
    suite = cst.SimpleStatementSuite([cst.Pass()])
    match node:
        case cst.Match():
            heads = "; ".join(_headline(module, case) for case in node.cases)
            return f"match {module.code_for_node(node.subject)}: {heads}"
        case cst.FunctionDef() | cst.ClassDef():
            node = node.with_changes(body=suite, leading_lines=(), decorators=())
        case cst.If() | cst.While() | cst.For():
            node = node.with_changes(body=suite, leading_lines=(), orelse=None)
        case cst.With() | cst.MatchCase() | cst.ExceptHandler():
            node = node.with_changes(body=suite, leading_lines=())
        case cst.Try():
            return "try"
        case _:
            pass
    return " ".join(module.code_for_node(node).replace(": pass", ":").split())


def mutants_of(path: Path) -> Iterator[Mutant]:
    wrapper = MetadataWrapper(cst.parse_module(path.read_text()))
    visitor = _Visitor(path, wrapper.module)
    wrapper.visit(visitor)
    yield from visitor.found


def functions_of(path: Path) -> dict[str, str]:
    """A digest of each function's code, whatever its comments and place; "" stands for the rest."""
    found: dict[str, str] = {}

    def look(body: list[ast.stmt], names: list[str]) -> None:
        rest: list[str] = []
        for part in body:
            if isinstance(part, ast.FunctionDef | ast.ClassDef):
                name = [*names, part.name]
                if isinstance(part, ast.ClassDef):
                    look(part.body, name)
                else:
                    key = ".".join(name)
                    found[key] = digest(found.get(key, "") + ast.dump(part))
            else:
                rest.append(ast.dump(part))
        found[".".join(names)] = digest("\n".join(rest))

    look(ast.parse(path.read_text()).body, [])
    return found

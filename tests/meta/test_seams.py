"""Tests come in through the front: none sets, wraps or calls what is private to production code.
Nor does the package look at another object's privates, but for those of libraries that are listed.

They may use verbs and constants that are public, of a class or an object, and what a constructor
takes. Reading something private is counted by file, and never grows. Owns the lists of files that
may do more: most plant bugs on purpose where those would be made.

A private name counts wherever it stands on the way: also a public verb of ``engine._steps`` is out
of reach, directly or by a local name for it.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from tests.meta.source import Module, last_name, modules, repository

SETTERS: Final = {"setattr", "delattr", "__setattr__", "object", "patch"}
"""Of builtins, ``monkeypatch`` and ``mock``: ``patch.object`` and ``patch`` itself."""
OURS: Final = "stratakv"
SEEDED: Final[dict[str, str]] = {
    "tests/conformance/test_kernels.py": "kernels that read what was never written",
    "tests/fleet_faults.py": "room on a host that is not there; answers of the other lane",
    "tests/pair_faults.py": "rows that are read and retracted; ends before all writes",
    "tests/property/test_bytes_under_the_engine.py": "what moves bytes, moving others",
    "tests/property/test_prefetch_seeded_bugs.py": "a few characters of one function, by its name",
    "tests/property/test_spilling_seeded_bugs.py": "the same",
    "tests/property/test_tree_seeded_bugs.py": "the same",
}
"""Seeded bugs: a test of the tests, which names what it breaks."""
OTHERS: Final[dict[str, str]] = {
    "tests/connect/sglang_cpu/sitecustomize.py": "functions of SGLang's, which need a GPU",
    "tests/unit/test_engine_module_code.py": "a name of torch's",
    "tests/unit/test_engine_module_identity.py": "attributes of modules of transformers",
    "tests/unit/test_storage_file_damage.py": "keys of one fingerprint, which nobody finds",
    "tests/unit/test_sparse_swap_in.py": "the compiled module is taken away, as if not built",
    "tests/unit/test_transfer_copier.py": "the same",
}
"""What is no object of ours, or cannot be had otherwise."""
ALLOWED: Final = SEEDED | OTHERS


CALLS: Final[dict[str, str]] = {
    "tests/conformance/test_cpu_transfer.py": "a seeded bug: an engine that drops its queue",
    "tests/integration/test_storage_sabotage.py": "seeded bugs: bytes that no store would have",
    "tests/unit/test_core_model_identity.py": "a reader is held where it happens to be",
    "tests/unit/test_disagg_page_places.py": "bytes between pages, which nobody else is given",
    "tests/unit/test_serve_connection_limits.py": "when a timer will fire, without waiting for it",
    "tests/unit/test_storage_file_peers.py": "damage is reported at a moment that is chosen",
    "tests/unit/test_testing_fleet_runs.py": "a seeded bug: one rank waits for a page more",
    "tests/unit/test_tiers_consistency.py": "seeded bugs: parts of one rank that are not another's",
    "tests/unit/test_tree_matching.py": "a seeded bug: a lease that is lost",
}
"""Who calls a private verb, or any verb of a private part."""
READS: Final[dict[str, int]] = {
    "tests/conformance/test_cpu_transfer.py": 2,
    "tests/fake_graphs.py": 6,
    "tests/fleet_faults.py": 2,
    "tests/pair_faults.py": 2,
    "tests/integration/test_disagg_ranks.py": 1,
    "tests/integration/test_disagg_roles.py": 1,
    "tests/integration/test_fleet_landing.py": 1,
    "tests/integration/test_storage_sabotage.py": 5,
    "tests/property/test_bytes_under_the_engine.py": 2,
    "tests/unit/test_core_model_identity.py": 1,
    "tests/unit/test_disagg_page_places.py": 1,
    "tests/unit/test_serve_bodies.py": 1,
    "tests/unit/test_serve_connection_limits.py": 4,
    "tests/unit/test_storage_file_peers.py": 2,
    "tests/unit/test_testing_fleet_runs.py": 4,
    "tests/unit/test_tiers_consistency.py": 4,
    "tests/unit/test_tree_journal.py": 2,
    "tests/unit/test_tree_matching.py": 4,
}
"""How many private attributes a file reads, those it calls too. A number only ever sinks."""
THEIRS: Final = frozenset({
    "_actions", "_attn_implementation", "_forward_hooks", "_forward_pre_hooks",  # argparse, torch
    "_asdict", "_fields", "_make", "_replace",  # named tuples, whose interface they are
})  # fmt: skip
"""Attributes of objects that are not ours."""


PACKAGE_READS: Final[dict[str, tuple[str, set[str]]]] = {
    "agreement/torch_ranks.py": ("torch has no public verb", {"group._set_pg_timeout"}),
    "engine/huggingface/lora_hooks.py": ("transformers'", {"model.config._attn_implementation"}),
    "engine/huggingface/model.py": ("transformers'", {"text._attn_implementation"}),
    "serve/followers.py": ("a public verb of the library", {"os._exit"}),
    "storage/redis.py": ("redis-py's socket", {"connection._parser", "connection._sock"}),
    "testing/fleet/runner.py": ("a copy of its own", {"made._tables"}),
    "testing/transport_sides.py": ("a public verb of the library", {"os._exit"}),
}
"""By module of the package: whose it is, and what."""


OWN: Final = {"tests/meta/test_seams.py"}
"""Its samples."""


def is_private(name: str) -> bool:
    return name[:1] == "_" != name[1:2] and name.isidentifier() and len(name) > 1


def others(module: Module) -> set[str]:
    """Names that are imported from somewhere else: their privates are not ours."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        match node:
            case ast.Import(names=names):
                found |= {(n.asname or n.name).split(".")[0] for n in names if not _is_ours(n.name)}
            case ast.ImportFrom(module=str(where), names=names) if not _is_ours(where):
                found |= {n.asname or n.name for n in names}
            case _:
                pass
    return found


def _is_ours(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] == OURS


def reaches_private(node: ast.expr, paths: dict[str, ast.expr]) -> bool:
    """Whether ``node`` names something private of something else than ``self``, on its way or by a
    local name (``paths``) that stands for such a way."""
    match node:
        case ast.Attribute(value=ast.Name("self" | "cls")):
            return False
        case ast.Attribute(value=base, attr=name):
            return is_private(name) or reaches_private(base, paths)
        case ast.Subscript(value=base):
            return reaches_private(base, paths)
        case ast.Name(name) if name in paths:
            return reaches_private(paths[name], {})
        case _:
            return False


def root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def local_paths(scope: ast.AST) -> dict[str, ast.expr]:
    """What local names stand for, where that is a way to something."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(scope):
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=value):
                found[name] = value
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                pairs = zip(names, values, strict=False)
                found |= {name.id: value for name, value in pairs if isinstance(name, ast.Name)}
            case _:
                pass
    return found


def forwarders(files: Iterable[Module]) -> dict[str, int]:
    """Functions that set what a parameter of theirs names, and which parameter that is."""
    found: dict[str, int] = {}
    for function in (one for module in files for one in module.functions()):
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        names = names[names[:1] in (["self"], ["cls"]) :]
        for node in ast.walk(function):
            match node:
                case ast.Call(func=func, args=[_, ast.Name(name), *_]) if name in names:
                    if last_name(func) in SETTERS:
                        found[function.name] = names.index(name)
                case _:
                    pass
    return found


NONE_AT_ALL: Final[Mapping[str, int]] = {}


def set_from_outside(module: Module, setters: Mapping[str, int] = NONE_AT_ALL) -> Iterator[str]:
    """What is private and is set, wrapped or replaced; ``setters`` are the tests' own. Where names
    of what is set stand in variables, each private name in the file counts."""
    foreign = others(module)
    paths: dict[int, dict[str, ast.expr]] = {}
    for scope in (module.tree, *sorted(module.functions(), key=lambda one: one.lineno)):
        own = local_paths(scope)
        for node in ast.walk(scope):  # the innermost last
            paths[id(node)] = paths.get(id(node), {}) | own
    by_variable = False
    for node in ast.walk(module.tree):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()):
                if root(node) not in foreign and reaches_private(node, paths[id(node)]):
                    yield ast.unparse(node)
            case ast.Call(func=func, args=[ast.Constant(value=str(path)), *_]):
                named = last_name(func) in SETTERS and _is_ours(path)
                if named and any(map(is_private, path.split("."))):
                    yield path
            case ast.Call(func=func, args=[owner, name, *_]) if last_name(func) in SETTERS:
                by_variable |= not isinstance(name, ast.Constant)
                private = isinstance(name, ast.Constant) and is_private(str(name.value))
                private |= reaches_private(owner, paths[id(node)])
                if private and root(owner) not in foreign:
                    yield ast.unparse(node)
            case ast.Call(func=func, args=args) if last_name(func) in setters:
                at = setters[last_name(func)]
                match args[at : at + 1]:
                    case [ast.Constant(str(name))] if is_private(name):
                        yield ast.unparse(node)
                    case [ast.Constant()] if not any(isinstance(a, ast.Starred) for a in args):
                        pass
                    case _:
                        by_variable = True
            case _:
                pass
    for node in ast.walk(module.tree) if by_variable else ():
        if isinstance(node, ast.Constant) and is_private(str(node.value)):
            yield str(node.value)


def read_from_outside(module: Module) -> list[str]:
    """What is private and not ``self``'s own, wherever it stands."""
    foreign = others(module)
    return [
        ast.unparse(node)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and node.attr not in THEIRS
        and last_name(node.value) not in {"self", "cls"}
        and root(node) not in foreign
    ]


def called_from_outside(module: Module) -> list[str]:
    """Of those, what is called, or has a verb that is."""
    called = [node.func for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    parts = [part for func in called for part in ast.walk(func) if isinstance(part, ast.Attribute)]
    read = set(read_from_outside(module))
    return sorted({name for part in parts if (name := ast.unparse(part)) in read})


BAD: Final = (
    "def f(patch): patch.setattr(Progress, '_collect', g)",
    "def f(cache): setattr(cache.retraction, '_room', g)",
    "def f(): mock.patch.object(Progress, '_collect', g)",
    "def f(): mock.patch('stratakv.storage.s3._failed')",
    "def f(patch): patch.setattr('stratakv.storage._sealed.read', g)",
    "def f(patch): patch.delattr(cache, '_live')",
    "def f(engine): engine._steps = g",
    "def f(engine): del engine._steps",
    "def f(engine): engine._steps.admit = g",
    "def f(lanes): lanes[0]._backend.write = g",
    "def f(engine, patch): patch.setattr(engine._steps, 'admit', g)",
    "def f(engine, patch):\n    steps = engine._steps\n    patch.setattr(steps, 'admit', g)",
    "def f(engine):\n    seen, steps = [], engine._steps\n    steps.admit = g",
    "def f(engine):\n    steps = engine._steps\n    def g(): steps.admit = f",
    "PLACES = (Progress, '_collect')\ndef f(patch): patch.setattr(*PLACES[:1], name, g)",
    "NAMES = ['_collect']\ndef f(patch, name): patch.setattr(Progress, name, g)",
)
FINE: Final = (
    "def f(patch): patch.setattr(Progress, 'wait', g)",
    "def f(patch): patch.setattr('stratakv.storage.s3.DELETED_AT_ONCE', 4)",
    "from tests.fixtures import servers\ndef f(patch): patch.setattr(servers, '_apt', g)",
    "import torch\ndef f(patch): patch.setattr(torch.nn, '_reduction', g)",
    "class A:\n    def f(self): self._rank = 1",
    "class A:\n    def f(self): self._engine.step = g",
    "def f(engine): return engine._steps",
    "def f(engine): engine.step = engine._steps",
    "def f(cache, name): setattr(cache, name, '_')",
    "def f(patch, name): patch.setattr(Progress, name, '__init__')",
)


FORWARDED: Final = (
    "def f(patch): seed(patch, Progress, '_collect', '1')",
    "BUG = (Progress, '_collect', '1')\ndef f(patch): seed(patch, *BUG)",
    "BUGS = ['_collect']\ndef f(patch, name): seeds.seed(patch, Progress, name, '1')",
)


def test_no_test_sets_what_is_private_to_production_code():
    for sample in BAD:
        assert list(set_from_outside(Module("sample.py", sample))), sample
    for sample in FINE:
        assert not list(set_from_outside(Module("sample.py", sample))), sample
    seeds = Module("seeds.py", "def seed(patch, owner, name, bug): patch.setattr(owner, name, bug)")
    assert (own := forwarders([seeds])) == {"seed": 2}
    for sample in FORWARDED:
        assert list(set_from_outside(Module("sample.py", sample), own)), sample
    sample = Module("sample.py", "def f(patch): seed(patch, Progress, 'wait', '_steps')")
    assert not list(set_from_outside(sample, own))
    tests = all_tests()
    assert len(tests) > 100
    setters = forwarders(tests)
    assert "seed_bug" in setters
    found = {one.name: sorted(set(set_from_outside(one, setters))) for one in tests}
    assert {name: what for name, what in found.items() if what and name not in ALLOWED} == {}
    assert {name for name in ALLOWED if not found[name]} == set(), "no exceptions any more"


CALLING: Final = (
    "def f(engine): engine._admit()",
    "def f(engine): engine._steps.admit()",
    "def f(worker): worker._hands[0].join()",
    "from stratakv.cli import x\ndef f(): x._parser()",
)
READING: Final = ("def f(cache): return cache._live", "def f(self): return self._engine._steps")
NEITHER: Final = (
    "def f(self): self._engine.step()",
    "def f(record): record._replace(x=1)",
    "def f(cache): cache.__class__.check(cache)",
    "import torch\ndef f(): torch._C.x()",
)


def all_tests() -> list[Module]:
    files = [Module(name, text) for name, text in repository() if name.endswith(".py")]
    return [one for one in files if one.name.startswith("tests/") and one.name not in OWN]


def test_no_test_calls_what_is_private_to_production_code():
    for sample in CALLING:
        assert called_from_outside(Module("sample.py", sample)), sample
    for sample in READING + NEITHER:
        assert not called_from_outside(Module("sample.py", sample)), sample
    found = {one.name: called_from_outside(one) for one in all_tests()}
    assert {name: what for name, what in found.items() if what and name not in CALLS} == {}
    assert {name for name in CALLS if not found[name]} == set(), "no exceptions any more"


def test_no_test_reads_more_of_what_is_private_than_it_did():
    for sample in CALLING + READING:
        assert read_from_outside(Module("sample.py", sample)), sample
    for sample in NEITHER:
        assert not read_from_outside(Module("sample.py", sample)), sample
    found = {one.name: len(read_from_outside(one)) for one in all_tests()}
    assert {name: count for name, count in found.items() if count} == READS


def package_reads(module: Module) -> set[str]:
    """Of other objects than ``self``, also through names that a library gave."""
    return {
        ast.unparse(node)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and node.attr not in {"_asdict", "_fields", "_make", "_replace"}
        and last_name(node.value) not in {"self", "cls"}
    }


def test_no_file_of_the_package_reaches_into_another_objects_privates():
    for sample in READING + CALLING:
        assert package_reads(Module("sample.py", sample)), sample
    assert not package_reads(Module("sample.py", "def f(self): self._engine.step()"))
    found = {module.name: package_reads(module) for module in modules()}
    allowed = {name: what for name, (_, what) in PACKAGE_READS.items()}
    assert {name: what for name, what in found.items() if what} == allowed

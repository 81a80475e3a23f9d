"""Nobody sets another object's attributes: whoever keeps a record has the verbs that change it."""

import ast
from collections.abc import Iterator
from typing import Final

from tests.meta.source import Module, last_name, modules


def own_attributes(module: Module) -> set[str]:
    """What the module's own classes have: declared, or set by one of their methods."""
    found: set[str] = set()
    for made in ast.walk(module.tree):
        if not isinstance(made, ast.ClassDef):
            continue
        for part in ast.walk(made):
            match part:
                case ast.AnnAssign(target=ast.Name(name)):
                    found.add(name)
                case ast.Attribute(value=ast.Name("self"), attr=name, ctx=ast.Store()):
                    found.add(name)
                case _:
                    pass
    return found


def made_here(function: ast.AST) -> set[str]:
    """Variables that a method which makes objects of its own class gives them."""
    found: set[str] = set()
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=targets, value=ast.Call(func=func)) if _makes(func):
                found |= {name.id for name in targets if isinstance(name, ast.Name)}
            case _:
                pass
    return found


def _makes(func: ast.expr) -> bool:
    return last_name(func) in {"cls", "__new__"}


def _named(arguments: list[ast.expr]) -> str:
    match arguments:
        case [ast.Constant(value=str(name)) | ast.Name(name)]:
            return name
        case _:
            return "?"


def assigned(module: Module) -> Iterator[str]:
    """``base.attribute`` for each that is set from outside."""
    own = own_attributes(module)
    scopes: list[ast.AST] = [*module.functions(), module.tree]
    made: dict[int, set[str]] = {}
    for scope in reversed(scopes):  # the innermost last
        here = made_here(scope)
        made |= dict.fromkeys(map(id, ast.walk(scope)), here)
    for node in ast.walk(module.tree):
        match node:
            case ast.Attribute(value=base, attr=name, ctx=ast.Store() | ast.Del()):
                mine = isinstance(base, ast.Name) and base.id in {"self", *made[id(node)]}
                if not mine and name not in own:
                    yield ast.unparse(node)
            case ast.Call(func=func, args=[base, *_]) if last_name(func) in SETTERS:
                if not (isinstance(base, ast.Name) and base.id == "self"):
                    yield f"{ast.unparse(base)}.{_named(node.args[1:2])}"
            case _:
                pass


SETTERS: Final = {"setattr", "delattr", "__setattr__"}
MODEL: Final = "the tree machine's own model: plain records, kept by all of its modules"
ALLOWED: Final[dict[str, tuple[str, set[str]]]] = {
    "bench/saved_model.py": ("of the package tokenizers", {"fast.decoder", "fast.pre_tokenizer"}),
    "bench/observability.py": (
        "logging, and what is left out for some turns",
        {"logger.propagate", "owner.name"},
    ),
    "bench/ranks_meter.py": ("torch.distributed is counted", {"dist.name"}),
    "cli.py": (
        "argparse",
        {"arguments.line", "part.description", "parser.description"},
    ),
    "core/logs.py": ("what Python does as it dies", {"sys.excepthook"}),
    "core/flag_parser.py": ("argparse", {"namespace.?"}),
    "engine/deepseek/common_shard.py": ("torch's modules", {"part.bias"}),
    "engine/deepseek/v32_model.py": (
        "a copy of transformers' config, of a rank's share",
        {
            f"share.{of}"
            for of in ("intermediate_size", "moe_intermediate_size", "num_attention_heads")
        },
    ),
    "engine/huggingface/model.py": ("modules of transformers", {"part.config"}),
    "engine/huggingface/other_names.py": (
        "modules of transformers, and a copy of a function",
        {"part.forward", "copy.__kwdefaults__"},
    ),
    "engine/huggingface/own_memory.py": ("torch's tensors", {"place.tensor.data"}),
    "serve/http_api.py": ("Starlette's router", {"app.router.redirect_slashes"}),
    "serve/log_throttle.py": ("a record of logging", {"record.msg"}),
    "storage/file/disk.py": ("a function of libc, by ctypes", {"_fallocate.argtypes"}),
    "testing/fleet/picture.py": ("the library's pickler", {"pickler.dispatch_table"}),
    "testing/tree_campaign.py": ("a class that Hypothesis makes", {"Campaign.policy"}),
    "testing/tree_driver.py": (
        MODEL,
        {f"request.{of}" for of in ("own", "part", "rolling", "table")},
    ),
    "testing/tree_machine.py": (MODEL, {"request.prompt"}),
    "testing/tree_marks_model.py": (MODEL, {"self.spot(place).used"}),
    "testing/tree_model.py": (
        MODEL,
        {f"held.{of}" for of in ("end", "on_host", "prompt", "starts")}
        | {"spot.moving", "spot.used", "self.spot(place).moving"},
    ),
    "testing/tree_retraction.py": (
        MODEL,
        {"again.continued", "again.part", "again.rolling", "request.part"},
    ),
    "testing/tree_store_model.py": (MODEL, {"held.on_host"}),
    "testing/tree_storing.py": (MODEL, {"fetch.hold", "fetch.id"}),
    "tree/residency.py": ("NumPy's arrays", {"self.states.flags.writeable"}),
}
"""By module, why it may, and what."""

BAD: Final = (
    "def f(request): request.row = 1",
    "def f(self): self._policy.nodes = nodes",
    "def f(counters): counters.hits += 1",
    "class A:\n    def f(self, other): other.theirs, self.mine = 1, 2",
    "def f(it): del it.hook",
    "def f(it):\n    for it.row in rows: pass",
    "def f(it): setattr(it, 'hook', g)",
    "def f(it): object.__setattr__(it, 'hook', g)",
    "def f(it):\n    it = it.parent()\n    it.row = 1",
    "def f():\n    made = Request()\n    made.row = 1",
)
FINE: Final = (
    "class A:\n    x: int\ndef f(a): a.x = 1",
    "class A:\n    def g(self): self.x = 1\ndef f(a): a.x += 1",
    "class A:\n    @classmethod\n    def of(cls):\n        it = cls()\n        it.z = 1",
    "def f(rows): rows.known[3] = 1",
)


def test_nobody_sets_another_objects_attributes():
    for sample in BAD:
        assert list(assigned(Module("sample.py", sample))), sample
    for sample in FINE:
        assert not list(assigned(Module("sample.py", sample))), sample
    found = {module.name: set(assigned(module)) for module in modules()}
    allowed = {name: what for name, (_, what) in ALLOWED.items()}
    assert {name: what for name, what in found.items() if what} == allowed

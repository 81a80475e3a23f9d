"""Our own arithmetic has a revision in every identity, and nobody need remember it.

A change of a source that computes, other than of comments and docstrings, asks for another
revision (``core/identity/revision.py``), or for a waiver below that says why results are the same
to the bit.
"""

import ast
import hashlib
from pathlib import Path

import stratakv
from stratakv.core.identity.revision import REVISION

ROOT = Path(stratakv.__file__).parent
SOURCES = (
    "engine/deepseek/*.py", "engine/attention/*.py", "engine/*/*.c", "engine/*.h", "core/*.h",
    *(f"engine/huggingface/{name}.py" for name in (
        "adapters", "attention", "compiled_state_steps", "hf_cache", "last_hidden", "lora_config",
        "lora_hooks", "model_call", "other_names", "page_selection", "parallel", "runner",
        "state_layer", "time_steps",
    )),
    "engine/batch.py", "engine/forward.py", "engine/in_c.py", "engine/rows.py",
    "engine/cuda/graph_*.py",
)  # fmt: skip
PINNED = {b"stratakv-arithmetic-3": "74e3d144e2a08665"}
"""What the sources were when a revision was new."""
WAIVERS: dict[str, str] = {
    "faa1dcc802d6f993": "the same, and a module's call and graphs of a GPU have files of their own",
    "357f809036330899": "the same, on any number of threads; what is in C is in identities",
    "b8ba85befca1d1eb": "the same, and on a GPU tokens and what is finite stay until they are read",
    "7ca5de25ce288e2d": "the same, and what chooses C for states has a public name",
    "7ab5109798d4812f": "the same, with one header for how helpers open arrays",
    "bcf69d63f5c24ce8": "the same, in rooms",
    "be0478b142b38075": "the same, and a model that is adopted again has its own forwards before",
    "7537003457a62953": "the same, and a GPU is not waited for with adapters",
}
"""Digest of the sources as they are: why results are those of the revision, to the bit."""


def without_docstrings(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                node.body = [one for one in node.body if not is_text(one)]
            case _:
                pass
    return shape(tree)


def shape(node: object) -> str:
    """Of every Python alike: newer ones have more fields, which are empty."""
    match node:
        case ast.AST():
            held = [(name, shape(value)) for name, value in ast.iter_fields(node) if value != []]
            return f"{type(node).__name__}{[one for one in held if one[1] != 'None']}"
        case list():
            return f"{[shape(one) for one in node]}"
        case _:
            return repr(node)


def is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def digest(root: Path) -> str:
    found = hashlib.sha256()
    files = sorted({file for pattern in SOURCES for file in root.glob(pattern)})
    for file in files:
        found.update(file.relative_to(root).as_posix().encode())
        text = file.read_text("utf-8")
        found.update((without_docstrings(text) if file.suffix == ".py" else text).encode())
    return found.hexdigest()[:16]


def test_what_computes_is_what_the_revision_says():
    now = digest(ROOT)
    assert now == PINNED.get(REVISION) or now in WAIVERS, (
        f"sources that compute are {now}: name another REVISION in core/identity/revision.py and "
        "pin them to it here, or say in WAIVERS why results are the same to the bit"
    )


def test_every_pattern_names_a_source():
    assert [pattern for pattern in SOURCES if not list(ROOT.glob(pattern))] == []


def test_words_do_not_count_and_code_does(tmp_path):
    file = tmp_path / "engine" / "huggingface" / "runner.py"
    file.parent.mkdir(parents=True)
    found = []
    for source in (
        '"""Runs."""\n\n\ndef run(x):\n    """Run."""\n    return 2 * x\n',
        '"""Does."""\n\n\ndef run(x):\n    return 2 * x  # twice\n',
        "def run(x):\n    return x * 2\n",
    ):
        file.write_text(source)
        found.append(digest(tmp_path))
    assert found[0] == found[1] != found[2]

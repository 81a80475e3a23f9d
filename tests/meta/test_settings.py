"""What an operator is told of a setting, in one wording: the flag as it was written, then why, then
what is allowed. Every rule is shown to bite on a sample.
"""

import ast
import re
from typing import Final

from tests.meta.source import Module, modules
from tests.meta.test_docs import unknown_flags

NAMED: Final = re.compile(r"--[a-z]|MODEL\b|model type |RANK and WORLD_SIZE ")
"""How a message begins: a flag, the argument, a field of config.json, what a launcher sets."""
VARIABLES: Final = frozenset({"flag", "FLAG", "KEY_FLAG", "ROOT_FLAG", "where", "place", "verb"})
"""What holds one of those: ``where`` a flag, its file and a line; ``verb`` a command."""
WRAPPED: Final = {
    "engine/adapters.py": "its caller puts ``--lora NAME=DIR`` before it",
    "engine/lora_config.py": "as engine/adapters.py",
    "engine/model_facts.py": "its caller puts ``MODEL PATH`` before it",
    "assembly/ranks.py": "what differs between ranks is a flag or the weights, by name",
    "core/model_identity.py": "a rank's own refusal, and whose it is",
    "serve/launch.py": "as core/model_identity.py",
    "serve/admin.py": "a refusal that another thread was told",
}


def refusals(module: Module) -> list[ast.expr]:
    return [call.args[0] for name, call in module.calls() if name == "ConfigError" and call.args]


def names_no_flag(message: ast.expr) -> bool:
    first = message.values[0] if isinstance(message, ast.JoinedStr) else message
    match first:
        case ast.Constant(str(text)):
            return not NAMED.match(text)
        case ast.FormattedValue(ast.Name(name)):
            return name not in VARIABLES
        case _:
            return True


def literal(message: ast.expr) -> str:
    """What of a message stands in the code."""
    texts = [node.value for node in ast.walk(message) if isinstance(node, ast.Constant)]
    return " ".join(text for text in texts if isinstance(text, str))


def test_a_refusal_begins_with_the_flag_or_the_field_that_is_refused():
    samples = ["f'{path} is bad'", "'bad'", "why", "f'{flag_name}: bad'"]
    assert all(names_no_flag(ast.parse(text, mode="eval").body) for text in samples)
    fine = ["f'--dtype {x}: allowed is y'", "f'{flag}: allowed is y'", "f'MODEL {path}: bad'"]
    assert not any(names_no_flag(ast.parse(text, mode="eval").body) for text in fine)
    found = {m.name for m in modules() if any(map(names_no_flag, refusals(m)))}
    assert found == WRAPPED.keys()


def test_a_refusal_names_no_flag_that_does_not_exist():
    sample = Module("sample.py", "raise ConfigError(f'--host-memry {x}: allowed is {y}')")
    assert [unknown_flags(literal(text)) for text in refusals(sample)] == [{"--host-memry"}]
    unknown = {m.name: unknown_flags(literal(text)) for m in modules() for text in refusals(m)
               if unknown_flags(literal(text))}  # fmt: skip
    assert not unknown

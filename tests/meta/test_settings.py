"""The refusal of a setting, in one wording: the flag as it was written, then why, then
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
    "engine/huggingface/adapters.py": "its caller puts ``--lora NAME=DIR`` before it",
    "engine/huggingface/lora_config.py": "as engine/huggingface/adapters.py",
    "engine/huggingface/model_facts.py": "its caller puts ``MODEL PATH`` before it",
    "assembly/rank_context.py": "what differs between ranks is a flag or the weights, by name",
    "core/model_identity.py": "a rank's own refusal, and whose it is",
    "serve/launch.py": "as core/model_identity.py",
    "core/flag_parser.py": "what argparse refuses begins with its name",
    "core/settings.py": "a refusal of a record, and where its value comes from",
    "cli.py": "a bench's --model, which a server's refusal calls MODEL",
    "serve/admin.py": "a refusal that another thread got",
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
        case ast.FormattedValue(ast.Call(ast.Name("given"), [ast.Constant(str(flag)), _])):
            return not NAMED.match(flag)
        case ast.FormattedValue(ast.Call(ast.Name("given"), [ast.Name(name), _])):
            return name not in VARIABLES
        case _:
            return True


def is_composed(message: ast.expr) -> bool:
    """Whether it ends in words that come from elsewhere."""
    last = message.values[-1] if isinstance(message, ast.JoinedStr) else message
    return not isinstance(last, ast.Constant)


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


def names_what_is_allowed(message: ast.expr) -> bool:
    return "allowed" in literal(message) or is_composed(message)


def test_a_refusal_of_a_flag_names_what_is_allowed():
    bad = ast.parse("f'--port {x}: it is taken'", mode="eval").body
    fine = ["f'--port {x}: allowed is y'", "f'--tp {x}: {reason}'", "f'--tp: {a}, allowed is b'"]
    assert not names_what_is_allowed(bad)
    assert all(names_what_is_allowed(ast.parse(text, mode="eval").body) for text in fine)
    of_flags = (
        (module.name, text)
        for module in modules()
        for text in refusals(module)
        if re.match("--[a-z]", literal(text))
    )
    silent = [(name, text.lineno) for name, text in of_flags if not names_what_is_allowed(text)]
    assert not silent


PUT_IN: Final = {
    "spec/sharding.py": ("sharding_refusal",),
    "engine/huggingface/parallel.py": ("tp_refusal", "_expert_refusal", "device_refusal"),
    "engine/deepseek/common_shard.py": ("own_shard_refusal",),
    "engine/deepseek/refused.py": ("own_refusal",),
}
"""Functions whose words stand behind a flag in the refusal of another module."""


def silent_reasons(function: ast.AST) -> list[str]:
    """What a function returns in words that do not say what is allowed."""
    found = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    words = [value for value in found if isinstance(value, ast.Constant | ast.JoinedStr)]
    return [text for one in words if (text := literal(one)) and not names_what_is_allowed(one)]


def test_a_reason_that_others_put_behind_a_flag_names_what_is_allowed():
    bad = "def f(x):\n    if x:\n        return f'{x} is odd'\n    return None"
    assert silent_reasons(ast.parse(bad)) == [" is odd"]
    for fine in ("f'{x} is odd; allowed is 2'", "f'{x} is odd; {allowed_ranks(x)}'", "reason"):
        assert not silent_reasons(ast.parse(bad.replace("f'{x} is odd'", fine)))
    functions = {(m.name, one.name): one for m in modules() for one in m.functions()}
    wanted = [functions[file, name] for file, names in PUT_IN.items() for name in names]
    assert [text for one in wanted for text in silent_reasons(one)] == []


def test_a_refusal_names_no_flag_that_does_not_exist():
    sample = Module("sample.py", "raise ConfigError(f'--host-memry {x}: allowed is {y}')")
    assert [unknown_flags(literal(text)) for text in refusals(sample)] == [{"--host-memry"}]
    unknown = {m.name: unknown_flags(literal(text)) for m in modules() for text in refusals(m)
               if unknown_flags(literal(text))}  # fmt: skip
    assert not unknown

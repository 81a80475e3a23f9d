"""The documents say what is so: links, flags, paths, rooms, the residency table, the versions.

Owns the tables that the documents quote. Every check is shown to bite on a sample.
"""

import argparse
import ast
import re
import tomllib
from functools import cache
from typing import Final

import pytest

from stratakv import cli
from stratakv.serve.config_command import SERVER_OPTIONS
from stratakv.serve.schemas import CHAT, COMPLETION, HARMLESS, NEUTRAL
from stratakv.tree.residency import TRANSITIONS, Residency, ResidencyEvent
from tests.doc_blocks import blocks_of
from tests.meta.source import PACKAGE, ROOT, modules, repository

PAGES: Final = {name: text for name, text in repository() if name.endswith(".md")}
README: Final = PAGES["README.md"]
README_LINES: Final = 150
SERVE: Final = PAGES["docs/serve.md"]
ADR_LINES: Final = 60
OTHERS_FLAGS: Final = {
    "--pd-disaggregation", "--vllm-pd-disaggregation",
    "--build-arg",
    "--set-upstream", "--nproc-per-node", "--no-python", "--again", "--only", "--report", "--tests",
    "--kv-transfer-config", "--enable-lora", "--load-format", "--prefix-caching-hash-algo",
    "--enable-prompt-tokens-details", "--enable-cache-report", "--enable-hierarchical-cache",
    "--hicache-size", "--hicache-storage-backend", "--hicache-storage-backend-extra-config",
    "--hicache-storage-prefetch-policy", "--hicache-write-policy", "--model-path",
    "--l2-adapter", "--no-skip-verify", "--speculative-draft-load-format", "--enable-metrics",
    "--enable-prefix-caching", "--l1-write-ttl-seconds", "--hash-algorithm",
    "--tokenizer", "--hf-config-path", "--trust-remote-code", "--json-model-override-args",
}  # fmt: skip
"""Flags of other programs that a document may name."""


def broken_links(page: str, text: str) -> list[str]:
    """Relative links, to a file that is there and to a heading that it has."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and anchor not in headings(file.read_text("utf-8"))):
            found.append(target)
    return found


def headings(text: str) -> set[str]:
    """As GitHub spells their anchors."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def missing_files(text: str) -> list[str]:
    """Code spans that look like a source file, from the root or inside the package."""
    named = re.findall(r"`([\w./-]+\.(?:py|c|toml|txt|md))`", text)
    places = (ROOT, PACKAGE)
    return [name for name in named if not any((place / name).exists() for place in places)]


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Every verb of the command line, by its words."""
    found: dict[str, argparse.ArgumentParser] = {}

    def walk(words: str, parser: argparse.ArgumentParser) -> None:
        found[words] = parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for verb, below in action.choices.items():
                    walk(f"{words} {verb}", below)

    walk("stratakv", cli.argument_parser())
    return found


def flags(verb: str) -> list[argparse.Action]:
    """Those that ``--help`` lists: a renamed flag's old name is not among them."""
    hidden = ("help", argparse.SUPPRESS)
    found = parsers()[verb]._actions
    return [a for a in found if a.option_strings and not {a.dest, a.help} & {*hidden}]


def flag_table() -> str:
    """The table of ``stratakv serve``, from the parser itself."""
    lines = ["| flag | default | what it sets |", "|---|---|---|"]
    defaults = {option.flag: option.shown_default for option in SERVER_OPTIONS}
    for action in flags("stratakv serve"):
        value = defaults.get(action.option_strings[0])
        default = f"`{value}`" if value else ""
        text = (action.help or "").partition(" (default: ")[0]
        lines.append(f"| `{action.option_strings[0]}` | {default} | {text} |")
    return "\n".join(lines)


def block(text: str, name: str) -> str:
    """What stands between ``<!-- name -->`` and ``<!-- /name -->``."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- /{name} -->", text, re.DOTALL)
    assert found, f"no <!-- {name} --> block"
    return found[1].strip()


@cache
def known_flags() -> frozenset[str]:
    parts = parsers().values()
    return frozenset(option for one in parts for a in one._actions for option in a.option_strings)


def unknown_flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) - known_flags() - OTHERS_FLAGS


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_are_there(page):
    assert not broken_links(page, PAGES[page])
    assert not missing_files(PAGES[page])


def test_a_broken_link_and_a_missing_file_are_seen():
    text = "# Two Words\n[a](nowhere.md) [b](README.md#two-words) `tree/none.py` `tree/nodes.py`"
    assert broken_links("README.md", text) == ["nowhere.md", "README.md#two-words"]
    assert headings(text) == {"two-words"}
    assert missing_files(text) == ["tree/none.py"]


def test_the_page_on_serving_has_every_flag_of_the_server():
    assert block(SERVE, "flags") == flag_table(), f"docs/serve.md needs:\n\n{flag_table()}\n"


def test_no_document_names_a_flag_that_does_not_exist():
    assert unknown_flags("`--host-memory 2GiB --hots-memory`") == {"--hots-memory"}
    assert not {page: unknown_flags(text) for page, text in PAGES.items() if unknown_flags(text)}


def test_the_page_on_serving_has_every_path_of_the_server():
    files = sorted((PACKAGE / "serve").glob("*.py"))
    source = "".join(file.read_text("utf-8") for file in files)
    paths = {path.partition("{")[0].rstrip("/") for path in re.findall(r'Route\("([^"]+)"', source)}
    assert len(paths) > 8
    named = re.findall(r"`(?:GET |POST |PUT |DELETE )(/[\w/.]*)", SERVE)
    listed = {path.rstrip("/") for path in named}
    assert listed == paths


def test_the_page_on_serving_says_of_every_field_what_becomes_of_it():
    """Honoured, ignored, refused unless it asks for nothing: a list each, in this order."""
    text = SERVE.partition("\nHonoured fields: ")[2]
    honoured, _, rest = text.partition("- **Ignored**")
    ignored, _, rest = rest.partition("- **Refused with a 400")
    refused, _, _ = rest.partition("- **Refused whatever")
    for listed, fields in (
        (honoured, (CHAT | COMPLETION) - {"model", "prompt", "messages"}),
        (ignored, HARMLESS),
        (refused, NEUTRAL.keys()),
    ):
        names = {name.partition(".")[0] for name in re.findall(r"`([a-z]\w+(?:\.\w+)?)`", listed)}
        assert fields <= names | {"n"}, fields - names
        assert names <= {*fields, "n", "usage", "prompt_tokens_details"}, names - fields


def test_the_readme_starts_with_the_two_commands():
    assert README.index("make demo") < README.index("make test") < README.index("\n## ")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    named = set(re.findall(r"\bmake ([a-z-]+)`", "".join(PAGES.values())))
    assert named <= set(targets)
    ci = (ROOT / ".ci" / "run").read_text("utf-8")
    for command in ("make check", "make test"):
        assert command in ci
        assert command in README
    assert ci.index("make check P") < ci.index("make demo P") < ci.index("make test P")


def test_the_readme_is_a_front_door():
    """It is short, and what it shows of the demo stands on that page, in that order."""
    assert len(README.splitlines()) <= README_LINES
    whole = iter(block(PAGES["docs/demo.md"], "demo").splitlines())
    shown = block(README, "demo").splitlines()
    assert len(shown) <= 15 + len(("fence", "fence"))
    assert all(line in whole for line in shown)


def test_the_readmes_six_figures_stand_on_the_page_of_figures():
    table = README.partition("## Six figures")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+) \| (.*\d.*) \| `bench (\w+)` \|$", table, re.MULTILINE)
    assert len(rows) == 6
    there = set(re.findall(r"[\d.,]*\d", PAGES["docs/figures.md"]))
    shown = {number for _, measured, _ in rows for number in re.findall(r"[\d.,]*\d", measured)}
    assert len(shown) > 10
    assert shown <= there
    assert not [part for *_, part in rows if f"stratakv bench {part}" not in parsers()]


def test_every_page_is_in_the_index():
    index = set(re.findall(r"\]\(([\w./-]+\.md)\)", PAGES["docs/README.md"]))
    pages = {name.removeprefix("docs/") for name in PAGES if name.startswith("docs/")}
    pages = {name for name in pages if not name.startswith("adr/0")} - {"README.md"}
    assert pages == {name for name in index if not name.startswith("../")}


def test_every_room_is_on_the_map():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    drawn = set(re.findall(r"^  (\w+)/ ", PAGES["ARCHITECTURE.md"], re.MULTILINE))
    assert drawn == rooms


def reading_list() -> list[str]:
    """The files of the core in ten minutes, in the order of reading."""
    return re.findall(r"^\| \d+ \| `([\w/.]+)` \|", PAGES["ARCHITECTURE.md"], re.MULTILINE)


def test_the_core_is_read_bottom_up():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    floors = {
        room: height
        for height, floor in enumerate(reversed(project["contracts"][0]["layers"]))
        for room in re.findall(r"\w+", floor)
    }
    read = reading_list()
    assert 8 <= len(read) <= 10
    heights = [floors[file.partition("/")[0]] for file in read]
    assert heights == sorted(heights)


def unknown_names(text: str) -> list[str]:
    """Code spans ``Class.method`` of which the package has no such class, or it no such method; and
    of "`name` in `file`" that the file does not define."""
    found = dict[str, set[str]]()
    places = dict[str, set[str]]()
    for module in modules():
        defined = places.setdefault(module.name, set())
        for node in ast.walk(module.tree):
            match node:
                case ast.ClassDef():
                    parts = {p.name for p in ast.walk(node) if isinstance(p, ast.FunctionDef)}
                    found.setdefault(node.name, set()).update(parts)
                    defined |= {node.name, *(f"{node.name}.{part}" for part in parts)}
                case ast.FunctionDef():
                    defined.add(node.name)
                case _:
                    pass
    spans = re.findall(r"`([A-Z]\w+)\.(\w+)`", text)
    unknown = [f"{name}.{verb}" for name, verb in spans if verb not in found.get(name, ())]
    for name, file in re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", text):
        if name not in places.get(file, ()):
            unknown.append(f"{name} in {file}")
    return unknown


def test_the_architecture_names_what_is_there():
    text = "`Pools.take` `Pools.took` `Poools.take` `Pools.take` in `tiers/pools.py`"
    assert unknown_names(text) == ["Pools.took", "Poools.take"]
    assert unknown_names("`bill` in `cache/losses.py`") == ["bill in cache/losses.py"]
    assert not unknown_names(PAGES["ARCHITECTURE.md"])


def test_a_pages_life_goes_through_every_state_and_event():
    drawn = next(b.code for b in blocks_of("", PAGES["ARCHITECTURE.md"]) if "ABSENT" in b.code)
    words = set(re.findall(r"\w+", drawn))
    assert {state.name for state in Residency} <= words
    assert {event.name.lower() for event in ResidencyEvent} <= words


def test_the_residency_table_in_the_architecture_is_the_one_in_force():
    drawn = re.findall(r"`(\w+)` --(\w+)--> `(\w+)`", PAGES["ARCHITECTURE.md"])
    drawn += re.findall(r"^\| (\w+) \| (\w+) \| (\w+) \|$", PAGES["ARCHITECTURE.md"], re.MULTILINE)
    table = {(a, event.lower(), b) for a, event, b in drawn if a in Residency.__members__}
    assert table == {(a.name, event.name.lower(), b.name) for (a, event), b in TRANSITIONS.items()}


def test_the_changelog_knows_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    released = re.findall(r"^## \[([\d.]+)\]", PAGES["CHANGELOG.md"], re.MULTILINE)
    assert released[0] == project["version"]


def faults_of_an_adr(name: str, text: str) -> list[str]:
    lines = text.splitlines()
    found = [] if len(lines) <= ADR_LINES else [f"{len(lines)} lines"]
    number = name[:4].lstrip("0")
    if not lines[0].startswith(f"# {number}. "):
        found.append("the title does not start with the number")
    wanted = ["Context", "Decision", "Consequences"]
    if re.findall(r"^## (.+)$", text, re.MULTILINE) != wanted:
        found.append(f"sections are not {wanted}")
    return found


def test_decisions_are_numbered_short_and_listed():
    records = {
        n.removeprefix("docs/adr/"): t for n, t in PAGES.items() if n.startswith("docs/adr/")
    }
    index = records.pop("README.md")
    assert [int(name[:4]) for name in sorted(records)] == list(range(1, len(records) + 1))
    assert not {n: faults_of_an_adr(n, t) for n, t in records.items() if faults_of_an_adr(n, t)}
    assert sorted(re.findall(r"\]\((\d{4}-[^)]+)\)", index)) == sorted(records)


def test_an_adr_that_is_long_or_shapeless_is_seen():
    good = "# 7. Title\n\n## Context\n\n## Decision\n\n## Consequences\n"
    assert not faults_of_an_adr("0007-title.md", good)
    assert len(faults_of_an_adr("0008-title.md", good.replace("Decision", "Idea") + "\n" * 60)) == 3

"""Writes docs/families.md: which types of causal LM the engine serves exactly, and why not others.

Every known type is tried with a tiny random model on the production engine: computed, hit on the
device, loaded from the host, each time compared with one forward of Hugging Face's without a cut.
Owns the page's text. Must not decide what is known (``stratakv.spec.families``), why not
(``families_not_served``), or how near is near enough (``tests.fixtures.bounds``).
"""

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch

from scripts.families_not_served import NOT_SERVED
from stratakv.core.errors import ConfigError
from stratakv.engine.huggingface.model_facts import plain_config
from stratakv.spec.derive import spec_of
from stratakv.spec.families import COMPOSITES, FAMILIES, NOT_CACHED
from stratakv.spec.groups import CacheSpec
from stratakv.spec.sharding import NOT_SPLIT, SPLIT_HEADS
from stratakv.spec.support import refusal
from tests.fixtures.bounds import ADAPTED, bound_of
from tests.fixtures.tiny_configs import tiny_config
from tests.hit_cases import prove_composite, prove_reuse

PAGE_TOKENS: Final = 16
DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "families.md"
HEAD: Final = """# Model families

Written by `python -m scripts.family_table` (two minutes). Do not edit.

Each `model_type` that the engine knows was tried with a tiny random model in fp32 on the production
engine: a prompt was computed, hit on the device and loaded back from the host. "exact" says that
tokens were every time those of Hugging Face's forward at batch 1 over the whole sequence, without
a cache and without a cut, and logits within the given part of the largest. Groups are those of the
tiny model; a checkpoint without windows has no `swa`. "With `--tp`" says what several ranks do:
each keeps the keys and values of its heads, or all of them keep the whole cache and split only
weights; where nothing is noted it runs on one rank only.

The bounds are what float32 loses, and Hugging Face loses as much by itself: against a run in
float64 its own forward is as far off as the engine (`python -m scripts.family_rounding` measures
both; `tests/integration/test_rounding.py` holds both). They are at least twice the worst that was
measured, since another CPU rounds otherwise, and a wrong page changes a logit by 1,000 times as
much (500 times in Zamba 2), which the tests prove too. They are those of tiny models: weights that
amplify more lose more, with and without a cache. A LoRA adapter rounds more: {adapted}. Where two
of a router's experts are nearly tied, rounding may choose the other one, with or without a cache;
no bound covers that.

| model type | cache groups | result | within | with `--tp` |
|---|---|---|---|---|
"""
WHOLE: Final = """
## With images or sound beside text

Checkpoints of these types are served with prompts of text alone. A tiny whole one was saved, loaded
and tried in the same way. Any other type around a text part of the table above is refused by name.

| model type | text part | result |
|---|---|---|
"""
TAIL: Final = """
## Not served

The other types of causal LM in this release of transformers, refused by name (but for `gpt-sw3`).

| model type | why |
|---|---|
"""


def known() -> list[str]:
    """Every type of the first table."""
    return sorted({*FAMILIES, *NOT_CACHED})


def exact() -> list[str]:
    """Those that the engine accepts; each of them must be proven."""
    return [family for family in known() if refused(family) is None]


def refused(family: str) -> str | None:
    """The reason a user is told, or None."""
    try:
        return refusal(spec(family))
    except ConfigError as error:
        return str(error)


def spec(family: str) -> CacheSpec:
    config = plain_config(tiny_config(family))
    return spec_of(config, page_tokens=PAGE_TOKENS, dtype="float32")


def groups(family: str) -> str:
    """Names and rules of the cache groups, as the table shows them."""
    if family in NOT_CACHED:
        return ""
    return ", ".join(f"{group.name} `{group.retention}`" for group in spec(family).groups)


def shared(family: str) -> str:
    """What ranks do with a type that is served."""
    if refused(family) is not None or family in NOT_SPLIT:
        return ""
    return "heads" if family in SPLIT_HEADS else "whole cache"


def within(family: str) -> str:
    """The bound of what is served, as a part of the largest logit."""
    return "" if refused(family) is not None else written(bound_of(family))


def written(bound: float) -> str:
    """2e-05 as "2e-5"."""
    return f"{bound:.0e}".replace("e-0", "e-")


def document(results: Iterable[tuple[str, str]]) -> str:
    """The page; ``results``: model type and what came out."""
    tried = "".join(
        f"| {family} | {groups(family)} | {result} | {within(family)} | {shared(family)} |\n"
        for family, result in results
    )
    whole = "".join(f"| {model} | {text} | exact |\n" for model, text in COMPOSITES.items())
    others = "".join(f"| {model} | {why} |\n" for model, why in NOT_SERVED.items())
    return HEAD.format(adapted=written(ADAPTED)) + tried + WHOLE + whole + TAIL + others


def result(family: str) -> str:
    """Try one family; AssertionError where it is accepted and not exact."""
    reason = refused(family)
    if reason is None:
        prove_reuse(family)
    return "exact" if reason is None else f"refused: {reason}"


def main() -> int:
    torch.set_num_threads(1)
    results: list[tuple[str, str]] = []
    for family in known():
        results.append((family, result(family)))
        print(f"{family}: {results[-1][1]}", flush=True)
    for model_type in COMPOSITES:
        with tempfile.TemporaryDirectory() as directory:
            prove_composite(model_type, Path(directory))
        print(f"{model_type}: exact as a whole", flush=True)
    DOCUMENT.write_text(document(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

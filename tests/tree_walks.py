"""Requests by hand over the tree machine's driver, which holds every step against its model."""

from stratakv.spec.retention import Retention
from stratakv.testing.specs import small_spec
from stratakv.testing.tree_books import Prefix
from stratakv.testing.tree_driver import TreeDriver
from stratakv.testing.tree_records import WalkRequest


def tree(*rules: Retention, anchor_bytes: bool = True) -> TreeDriver:
    spec = small_spec(rules, page_tokens=1, anchor_bytes=anchor_bytes)
    return TreeDriver(spec, [16] * len(spec.groups), [16] * len(spec.groups))


def run(it: TreeDriver, prompt: Prefix, *, generous: bool = True) -> WalkRequest:
    request = it.arrive(prompt, len(prompt) - 1, load=False)
    it.extend(request, len(prompt), generous=generous)
    it.verify()
    return request


def serve(it: TreeDriver, *prompts: Prefix, generous: bool = True) -> None:
    for prompt in prompts:
        request = run(it, prompt, generous=generous)
        it.keep(request, len(prompt), request.continued)
        it.finish(request)
        it.verify()


def save(it: TreeDriver, tip: Prefix, group: int) -> None:
    assert it.backup(tip, group, 99)
    it.end_copy(it.copies[-1], ok=True)
    it.verify()


def left(it: TreeDriver, *prompts: Prefix) -> list[Prefix]:
    return [prompt for prompt in prompts if it.match(prompt, len(prompt))[1] == len(prompt)]

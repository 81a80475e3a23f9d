"""The tree machine with groups whose home is the host: requests are admitted spilled or become it
while they run, read there what is whole there, and receive pages there.

Owns the walks' steps of spilling. Must not decide what is right.
"""

from dataclasses import replace

from hypothesis.stateful import precondition, rule

from stratakv.spec.groups import BufferSpec, CacheSpec, Home
from stratakv.spec.retention import KeepAll
from stratakv.testing.tree_books import Prefix
from stratakv.testing.tree_driver import TreeDriver
from stratakv.testing.tree_machine import CHUNK, MAX_PAGES, PICK, TAIL, YES
from stratakv.testing.tree_records import WalkRequest
from stratakv.testing.tree_spilling import SpillDriver
from stratakv.testing.tree_storing_machine import StoringMachine


class SpillingMachine(StoringMachine):
    """Of every spec the first group behind the anchor, and every other one that keeps all, is at
    home on the host."""

    spilling: SpillDriver

    def drawn(self, spec: CacheSpec) -> CacheSpec:
        return replace(
            spec,
            groups=tuple(
                replace(group, retention=KeepAll(), home=Home.HOST, buffers=_rows(spec, at))
                if at == 1 or (at and group.keeps_all)
                else group
                for at, group in enumerate(spec.groups)
            ),
        )

    def opened(self, it: TreeDriver) -> None:
        super().opened(it)
        self.spilling = SpillDriver(it)

    def began(self, request: WalkRequest, pick: int) -> None:
        """As a rule it is spilled, and what it has computed is on the host by now."""
        if pick % 4 and self.it.tree.spilled.groups:
            self._spill(request, saved=bool(pick % 4 > 1))
            self.spilling.settle(request)

    def _spill(self, request: WalkRequest, *, saved: bool) -> None:
        it, tip = self.it, request.prompt[: request.lease.end]
        self.spilling.spill(request)
        before = len(it.copies)
        for group in it.tree.spilled.groups if tip else ():
            it.backup(tip, group, MAX_PAGES)
        for copy in it.copies[before:] if saved else ():
            it.end_copy(copy, ok=True)

    def _spilled(self) -> list[WalkRequest]:
        return [request for request in self.it.requests if request.lease.near]

    @precondition(lambda self: self.it.tree.spilled.groups and not self.full)
    @rule(pick=PICK, tail=TAIL, known=YES)
    def arrive_spilled(self, pick: int, tail: Prefix, known: bool) -> None:  # noqa: FBT001
        """``known``: it asks for something that is in the tree."""
        with self.step() as it:
            tips = list(it.model.nodes) if known else []
            prompt = (*tips[-1 - pick % len(tips)], *tail) if tips else self.prompt(pick, tail)
            self.prompts.append(prompt[:MAX_PAGES])
            prompt = self.prompts[-1]
            request = it.arrive(prompt, len(prompt), load=True, spill=True)
            it.did["read on the host at once"] += bool(it.model.leases[request.id].away)

    @precondition(lambda self: self.it.tree.spilled.groups and self.it.requests)
    @rule(pick=PICK, saved=YES)
    def spill(self, pick: int, saved: bool) -> None:  # noqa: FBT001
        with self.step():
            request = self.request(pick)
            if not request.lease.near:
                self._spill(request, saved=saved)

    @precondition(lambda self: self._spilled())
    @rule(pick=PICK, end=YES)
    def settle(self, pick: int, end: bool) -> None:  # noqa: FBT001
        """``end``: after all copies under way."""
        with self.step() as it:
            for copy in list(it.copies) if end else ():
                it.end_copy(copy, ok=bool(copy.load or pick % 8))
            some = self._spilled()
            self.spilling.settle(some[pick % len(some)])

    @precondition(lambda self: self._spilled())
    @rule(pick=PICK, chunk=CHUNK, tail=TAIL, state=YES)
    def receive(self, pick: int, chunk: int, tail: Prefix, state: bool) -> None:  # noqa: FBT001
        with self.step() as it:
            some = self._spilled()
            request = some[pick % len(some)]
            self.extend_prompt(request, tail)
            if request.lease.end < len(request.prompt):
                came = it.extend(request, chunk, generous=False, state=state, received=True)
                it.did["received"] += came


def _rows(spec: CacheSpec, at: int) -> tuple[BufferSpec, ...]:
    """Bytes for each token, whatever the group kept before."""
    group = spec.groups[at]
    (buffer,) = group.buffers
    return (replace(buffer, rows_per_page=spec.page_tokens),)

"""The tree machine with a store below the host: what is worth it is written, what a request lacks
is fetched, and what storage holds on the host never keeps a device page.

Owns the walks' storage steps. Must not decide what is right.
"""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from stratakv.testing.specs import MAX_GROUPS
from stratakv.testing.tree_books import Prefix
from stratakv.testing.tree_machine import CHUNK, MAX_PAGES, PICK, TAIL, YES, TreeMachine


class StoringMachine(TreeMachine):
    @rule(pick=PICK)
    def attach(self, pick: int) -> None:
        """Storage comes, goes, or is emptied."""
        with self.step():
            if not self.storing.active or not pick % 4:
                self.storing.start()
            elif pick % 4 == 1:
                self.storing.stop()
            elif pick % 4 == 2:
                self.storing.forget()

    @precondition(lambda self: self.storing.writes)
    @rule(pick=PICK, kept=YES)
    def end_write(self, pick: int, kept: bool) -> None:  # noqa: FBT001
        """Writes end in any order; ``kept``: all of it, else what the bits of ``pick`` say."""
        with self.step():
            writes = self.storing.writes
            write = writes[pick % len(writes)]
            bits = [kept or bool(pick >> 4 + at & 1) for at in range(len(write.writing.rows))]
            self.storing.end_write(write, bits)

    @precondition(lambda self: self.it.requests)
    @rule(pick=PICK)
    def use(self, pick: int) -> None:
        with self.step():
            self.storing.use(self.request(pick))
            self._squeeze(pick // 4)

    @precondition(lambda self: len(self.it.prefetches) < 2)
    @rule(pick=PICK, tail=TAIL, arrived=st.integers(0, MAX_PAGES), race=CHUNK)
    def prefetch(self, pick: int, tail: Prefix, arrived: int, race: int) -> None:
        """``race``: a request computes the same pages meanwhile."""
        with self.step() as it:
            tips = list(it.model.nodes) if pick & 4 and it.model.nodes else self.prompts
            prompt = (*tips[-1 - pick // 8 % len(tips)], *tail)[:MAX_PAGES] or (0,)
            self.prompts.append(prompt)
            begun = self.storing.prefetch(prompt)
            if race == 1 and not self.full:
                request = it.arrive(prompt, len(prompt), load=False)
                if request.lease.end < len(prompt):
                    it.extend(request, 2, generous=bool(pick & 2))
            if begun and pick & 3:
                self.storing.end_prefetch(it.prefetches[-1], arrived or MAX_PAGES)
            self._squeeze(pick // 4)

    @precondition(lambda self: self.it.prefetches)
    @rule(pick=PICK, arrived=st.integers(0, MAX_PAGES))
    def end_prefetch(self, pick: int, arrived: int) -> None:
        with self.step() as it:
            self.storing.end_prefetch(it.prefetches[pick % len(it.prefetches)], arrived)

    @precondition(lambda self: self.storing.landed)
    @rule(pick=PICK)
    def let_go(self, pick: int) -> None:
        with self.step():
            self.storing.let_go(self.storing.landed[pick % len(self.storing.landed)])

    @precondition(lambda self: self.it.model.nodes)
    @rule(group=st.integers(0, MAX_GROUPS - 1))
    def squeeze(self, group: int) -> None:
        with self.step() as it:
            self.storing.squeeze(group % len(it.spec.groups))

    def _squeeze(self, pick: int) -> None:
        """Sometimes, while storage holds something."""
        if not pick % 4 and self.it.model.nodes:
            self.storing.squeeze(pick // 4 % len(self.it.spec.groups))

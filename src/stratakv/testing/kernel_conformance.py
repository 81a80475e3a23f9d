"""The suite that attention kernels must pass; subclass it beside yours. Owns the contract of
``engine.attention.kernels``, as tests against float64.

    class TestMyKernels(KernelConformance):
        device = torch.device("cuda")
        dtypes = (torch.bfloat16,)

        def kernels(self, dtype):
            return MyKernels(dtype)

Every row that nobody owns, and every one that the group's rule lets go of, is NaN. Needs the extras
``serve`` and ``testing`` (pytest).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Final

import numpy as np
import pytest
import torch

from stratakv.core.ids import NONE, GroupId
from stratakv.engine.attention.kernels import (
    AttentionKernels,
    Context,
    Expanded,
    GroupAttention,
    IndexKeys,
    Paged,
    SelectedRows,
)
from stratakv.engine.attention.paged_layer import Scoring
from stratakv.spec.retention import KeepAll, KeepChunk, KeepWindow, Retention
from stratakv.testing.kernel_oracle import (
    Heads,
    KernelStep,
    PagedCase,
    Spans,
    best,
    latent_layer,
    poisoned,
    selected,
)

RULES: Final[tuple[Retention, ...]] = (KeepAll(), KeepWindow(1), KeepWindow(13), KeepChunk(12))
RAGGED: Final[Spans] = (
    (30, 1), (0, 1), (15, 1), (95, 1), (16, 1), (24, 1), (0, 9), (13, 40), (48, 1), (32, 16),
)  # fmt: skip
BATCHES: Final[Mapping[str, Spans]] = {
    "one": ((20, 1),),
    "equal": ((37, 1),) * 5,
    "decode": RAGGED[:6],
    "apart": ((500, 1), (3, 1), (0, 1), (130, 1)),
    "first": ((0, 150),),
    "later": ((13, 20), (40, 33)),
    "mixed": RAGGED,
}
SCALE: Final = 0.3
SCORINGS: Final = ("plain", "softcap", "sinks", "both")
HEADS: Final = (Heads(4, 4), Heads(6, 2, 16, 8), Heads(5, 1, 8, 24))


def scoring_of(name: str, heads: int, device: torch.device, dtype: torch.dtype) -> Scoring:
    sinks = torch.linspace(-1, 3, heads).to(device, dtype)
    return Scoring(
        scale=SCALE,
        softcap=0.4 if name in {"softcap", "both"} else None,
        sinks=sinks if name in {"sinks", "both"} else None,
    )


class KernelConformance(ABC):
    """Subclass as ``Test...`` and implement ``kernels``."""

    device: ClassVar[torch.device] = torch.device("cpu")
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)
    """Of queries and pages."""
    bounds: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float32: 4e-6,
        torch.float16: 6e-3,
        torch.bfloat16: 4e-2,
    }
    """How far from float64, in parts of the largest number."""

    @abstractmethod
    def kernels(self, dtype: torch.dtype) -> AttentionKernels: ...

    # --- over pages ------------------------------------------------------------------------------

    @pytest.mark.parametrize("rule", RULES, ids=str)
    @pytest.mark.parametrize("page_tokens", [1, 4, 16])
    @pytest.mark.parametrize("batch", BATCHES)
    def test_a_token_attends_to_what_its_rule_keeps(
        self, rule: Retention, page_tokens: int, batch: str
    ) -> None:
        for dtype in self.dtypes:
            step = self._step(rule, page_tokens, BATCHES[batch], dtype)
            self._holds(self.kernels(dtype), PagedCase.of(step), "plain")

    @pytest.mark.parametrize("scoring", SCORINGS)
    @pytest.mark.parametrize("heads", HEADS, ids=str)
    def test_heads_share_keys_and_scores_are_capped_and_sunk(
        self, heads: Heads, scoring: str
    ) -> None:
        for dtype in self.dtypes:
            step = self._step(KeepWindow(13), 4, RAGGED, dtype)
            self._holds(self.kernels(dtype), PagedCase.of(step, heads), scoring)

    def test_groups_and_layers_of_a_step_do_not_meet(self) -> None:
        """Groups have tables and rules of their own; layers of a group share a plan, even where
        they have other heads."""
        for dtype in self.dtypes:
            kernels = self.kernels(dtype)
            steps = [
                self._step(rule, 4, RAGGED, dtype, group=at, seed=at)
                for at, rule in enumerate(RULES)
            ]
            layers = [
                PagedCase.of(step, heads, salt)
                for step in steps
                for salt, heads in ((0, HEADS[0]), (1000, HEADS[1]), (2000, HEADS[0]))
            ]
            plans = {
                case.step.group: kernels.plan(case.group, case.step.shape, case.step.table)
                for case in layers[::3]
            }
            for case in layers:
                plan = plans[case.step.group]
                scoring = self._scoring("plain", case)
                self._near(self._attended(kernels, plan, case, scoring), case.right(scoring))

    def test_steps_leave_nothing_behind(self) -> None:
        """Longer and shorter ones, of the same kernels."""
        for dtype in self.dtypes:
            kernels = self.kernels(dtype)
            for seed, batch in enumerate(("mixed", "one", "later", "apart", "equal", "decode")):
                step = self._step(KeepChunk(12), 4, BATCHES[batch], dtype, seed=seed)
                self._holds(kernels, PagedCase.of(step), "sinks")

    @pytest.mark.parametrize("damaged", [0, 3, 7])
    def test_what_is_not_finite_harms_its_own_request_alone(self, damaged: int) -> None:
        for dtype in self.dtypes:
            case = PagedCase.of(self._step(KeepAll(), 4, RAGGED, dtype))
            pages = [int(page) for page in case.step.table[damaged + 1] if page != NONE]
            for pool in (case.layer.key_pages, case.layer.value_pages):
                pool[pages] = poisoned(pool[pages])
            scoring = self._scoring("plain", case)
            kernels = self.kernels(dtype)
            plan = kernels.plan(case.group, case.step.shape, case.step.table)
            found, right = self._attended(kernels, plan, case, scoring), case.right(scoring)
            counts = [count for _, count in RAGGED]
            others = [row for row in range(len(RAGGED)) if row != damaged]
            mine, wanted = found.split(counts), right.split(counts)
            self._near(
                torch.cat([mine[row] for row in others]), torch.cat([wanted[row] for row in others])
            )

    def test_a_token_without_a_page_is_refused(self) -> None:
        step = self._step(KeepAll(), 4, RAGGED, self.dtypes[0])
        step.table[4, 2] = NONE
        with pytest.raises(AssertionError):
            self.kernels(self.dtypes[0]).plan(PagedCase.of(step).group, step.shape, step.table)

    # --- latents ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("rule", RULES[::2], ids=str)
    @pytest.mark.parametrize("batch", BATCHES)
    def test_latents_are_gathered_once_and_attended_expanded(
        self, rule: Retention, batch: str
    ) -> None:
        heads = Heads(4, 4, 8, 12)
        for dtype in self.dtypes:
            step, kernels = self._step(rule, 4, BATCHES[batch], dtype), self.kernels(dtype)
            contexts = step.contexts(10, salt=1)
            layer = latent_layer(step, contexts)
            plan = kernels.plan(step.attention_group(400), step.shape, step.table)
            kernels.write(layer.rows, plan.slots, step.fresh(contexts))
            gathered = plan.gather(layer)
            assert gathered.dtype == dtype
            to_keys = step.draw(heads.key, 10, heads.key_dim, salt=2) / 10**0.5
            to_values = step.draw(heads.key, 10, heads.value_dim, salt=3) / 10**0.5
            context = Expanded(gathered @ to_keys, gathered @ to_values)
            tokens = len(step.shape.positions)
            query = step.draw(heads.query, tokens, heads.key_dim, salt=4).transpose(0, 1)
            scoring = scoring_of("plain", heads.query, self.device, dtype)
            keys = [(rows @ to_keys).transpose(0, 1) for rows in contexts]
            values = [(rows @ to_values).transpose(0, 1) for rows in contexts]
            found = _both(plan, query, context, scoring)
            self._near(found, step.right(query, keys, values, scoring))

    # --- rows ------------------------------------------------------------------------------------

    def test_rows_go_to_their_slots_and_nowhere_else(self) -> None:
        for dtype in self.dtypes:
            step, kernels = self._step(KeepWindow(13), 4, RAGGED, dtype), self.kernels(dtype)
            contexts = step.contexts(10, salt=1)
            layer = latent_layer(step, contexts)
            plan = kernels.plan(step.attention_group(400), step.shape, step.table)
            page, inside = np.divmod(step.shape.positions, step.page_tokens)
            slots = step.table[step.shape.token_rows, page] * step.page_tokens + inside
            assert plan.slots.tolist() == slots.tolist()
            assert plan.decodes == step.shape.decodes
            before = layer.rows.clone()
            rows = step.fresh(contexts)
            kernels.write(layer.rows, plan.slots, rows.double() if dtype.itemsize > 2 else rows)
            assert layer.rows[slots].equal(rows)
            others = np.setdiff1d(np.arange(len(before)), slots)
            after, before = (of[others].view(torch.uint8) for of in (layer.rows, before))
            assert after.equal(before)

    @pytest.mark.parametrize("sinks", [False, True])
    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("parts", [1, 2])
    def test_selected_rows_are_attended_together(
        self, parts: int, *, shared: bool, sinks: bool
    ) -> None:
        queries, heads, dim, value_dim = 5, 3, 8, 6
        random = np.random.default_rng(parts)
        for dtype in self.dtypes:
            step = self._step(KeepAll(), 4, RAGGED[:queries], dtype)
            asked, wanted = list[SelectedRows](), list[tuple[torch.Tensor, torch.Tensor]]()
            for part in range(parts):
                count = (7, 40)[part]
                pool = poisoned(step.draw(60, dim))
                rows = np.stack([random.permutation(60)[:count] for _ in range(queries)])
                rows = np.broadcast_to(rows[:1], rows.shape) if shared else rows
                hidden = random.random(rows.shape) < 0.3
                hidden[:, 0] = False
                pool[np.unique(rows)] = step.draw(len(np.unique(rows)), dim, salt=part)
                seen = np.zeros((queries, 60), np.bool_)
                for at in range(queries):
                    seen[at, rows[at][~hidden[at]]] = True
                index = torch.from_numpy(rows[0].copy() if shared else rows.copy()).to(self.device)
                hides = torch.from_numpy(hidden).to(self.device)
                asked.append(SelectedRows(pool, index, hides))
                wanted.append((pool, torch.from_numpy(seen).to(self.device)))
            query = step.draw(queries, heads, dim, salt=9)
            scoring = scoring_of("sinks" if sinks else "plain", heads, self.device, dtype)
            found = self.kernels(dtype).attend_selected(
                query, asked, value_dim, SCALE, scoring.sinks
            )
            self._near(found, selected(query, wanted, value_dim, scoring))

    def test_nothing_need_be_hidden_of_what_is_selected(self) -> None:
        for dtype in self.dtypes:
            step = self._step(KeepAll(), 4, RAGGED[:2], dtype)
            pool, query = step.draw(9, 8), step.draw(2, 3, 8, salt=1)
            rows = torch.tensor([[8, 0], [3, 4]]).to(self.device)
            seen = torch.zeros(2, 9, dtype=torch.bool).to(self.device).scatter(1, rows, value=True)
            asked = (SelectedRows(pool, rows, None),)
            found = self.kernels(dtype).attend_selected(query, asked, 8, SCALE, None)
            scoring = scoring_of("plain", 3, self.device, dtype)
            self._near(found, selected(query, [(pool, seen)], 8, scoring))

    # --- what an indexer chooses ------------------------------------------------------------------

    @pytest.mark.parametrize("hides", ["nothing", "some", "the last"])
    @pytest.mark.parametrize("shared", [False, True])
    def test_the_best_keys_are_chosen_and_the_first_of_equal_ones(
        self, hides: str, *, shared: bool
    ) -> None:
        """Of whole numbers, whose scores nothing rounds."""
        queries, heads, dim, keys, k = 5, 4, 8, 300, 40
        random = np.random.default_rng(len(hides))
        for dtype in self.dtypes:
            pool = torch.full((400, dim), torch.nan, dtype=dtype, device=self.device)
            rows = np.stack(
                [random.permutation(400)[:keys] for _ in range(1 if shared else queries)]
            )
            used = np.unique(rows)
            pool[used] = self._whole(random, dtype, len(used), dim)
            hidden = torch.from_numpy(random.random((queries, keys)) < 0.5).to(self.device)
            counts = torch.tensor([keys, 0, k - 1, k, 200]).to(self.device)
            asked = IndexKeys(
                pool,
                torch.from_numpy(rows[0] if shared else rows).to(self.device),
                hidden if hides == "some" else None,
                counts if hides == "the last" else None,
            )
            query = self._whole(random, dtype, queries, heads, dim)
            weights = self._whole(random, torch.float32, queries, heads)
            found = self.kernels(dtype).best_keys(query, weights, asked, k)
            assert found.tolist() == best(query, weights, asked, k).tolist()

    def test_equal_keys_have_equal_scores_wherever_they_lie(self) -> None:
        """Or it would be chance which of them a query sees."""
        for dtype in self.dtypes:
            step = self._step(KeepAll(), 4, RAGGED[:3], dtype)
            pool, query = step.draw(9, 16), step.draw(3, 8, 16, salt=1)
            rows = np.random.default_rng(1).integers(0, 9, (3, 700))
            weights = step.draw(3, 8, salt=2).float()
            asked = IndexKeys(pool, torch.from_numpy(rows).to(self.device))
            found = self.kernels(dtype).best_keys(query, weights, asked, 150).tolist()
            for row, places in zip(rows, found, strict=True):
                chosen = [np.flatnonzero(row == key).tolist() for key in np.unique(row[places])]
                mine = [[at for at in places if at in alike] for alike in chosen]
                assert all(
                    alike[: len(one)] == one for alike, one in zip(chosen, mine, strict=True)
                )
                assert sum(len(one) < len(of) for one, of in zip(mine, chosen, strict=True)) <= 1

    # --- what they stand on ----------------------------------------------------------------------

    def _step(
        self,
        rule: Retention,
        page_tokens: int,
        spans: Spans,
        dtype: torch.dtype,
        *,
        group: int = 0,
        seed: int = 0,
    ) -> KernelStep:
        where = GroupId(group)
        return KernelStep(rule, page_tokens, spans, dtype, self.device, group=where, seed=seed)

    def _whole(self, random: np.random.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.from_numpy(random.integers(-3, 4, shape)).to(self.device, dtype)

    def _scoring(self, name: str, case: PagedCase) -> Scoring:
        return scoring_of(name, case.heads.query, self.device, case.query.dtype)

    def _holds(self, kernels: AttentionKernels, case: PagedCase, scoring: str) -> None:
        plan = kernels.plan(case.group, case.step.shape, case.step.table)
        how = self._scoring(scoring, case)
        self._near(self._attended(kernels, plan, case, how), case.right(how))

    def _attended(
        self, kernels: AttentionKernels, plan: GroupAttention, case: PagedCase, scoring: Scoring
    ) -> torch.Tensor:
        """[T, H, value dim], after the step's rows are written."""
        keys, values = case.step.fresh(case.keys), case.step.fresh(case.values)
        kernels.write(case.layer.key_rows, plan.slots, keys.flatten(1))
        kernels.write(case.layer.value_rows, plan.slots, values.flatten(1))
        context = Paged(case.layer, keys.transpose(0, 1), values.transpose(0, 1))
        return _both(plan, case.query, context, scoring)

    def _near(self, found: torch.Tensor, right: torch.Tensor) -> None:
        assert found.shape == right.shape
        assert found.isfinite().all(), "a row was read that nobody owns, or that a rule lets go of"
        bound = self.bounds[found.dtype] * max(1.0, right.abs().max().item())
        assert (found.double() - right).abs().max() <= bound


def _both(
    plan: GroupAttention, query: torch.Tensor, context: Context, scoring: Scoring
) -> torch.Tensor:
    """query [T, H, D] -> [T, H, value dim]."""
    decodes, out = plan.decodes, list[torch.Tensor]()
    with torch.inference_mode():
        if decodes:
            out.append(plan.decode(query[:decodes], context, scoring))
        if decodes < len(query):
            out.append(plan.prefill(query[decodes:], context, scoring))
    return torch.cat(out)

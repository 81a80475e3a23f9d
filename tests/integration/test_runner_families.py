"""Every family that we serve, unmodified, on our pages: the logits of its own cache.

Beside the ragged schedule: states that are kept while their requests go on, equal chunks side by
side, and requests that begin on a snapshot. Everything that no request owns is NaN.
"""

import pytest
import torch

from stratakv.core.errors import ConfigError
from stratakv.engine.huggingface.model import wrap
from stratakv.engine.huggingface.model_facts import plain_config
from stratakv.spec.derive import spec_of
from stratakv.spec.families import FAMILIES
from stratakv.spec.support import continues_token_by_token, refusal, state_places
from tests.exact_families import NAMED, case
from tests.fixtures.bounds import bound_of
from tests.fixtures.models import TOLERANCE, model_to_give_away, stepped, tiny_model
from tests.fixtures.runner_host import Host
from tests.fixtures.schedules import LENGTHS, assert_same, ragged_schedule, references
from tests.fixtures.tiny_configs import CONFIGS

REFUSED = {"recurrent_gemma": "in the modules"}
OWN_TESTS = {"deepseek_v4"}
"""Its pages are multiples of what it compresses, 16 here: ``test_deepseek_v4.py``."""
SERVED = sorted({*CONFIGS} & {*FAMILIES} - {*REFUSED} - OWN_TESTS)
STATES = [
    "qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "nemotron_h", "falcon_h1", "bamba",
    "granitemoehybrid", "zamba2", "mamba2", "lfm2", "lfm3", "jamba", "mamba", "falcon_mamba",
]  # fmt: skip
RESUMED = [*STATES, "llama", "gemma3_text", "llama4_text", "deepseek_v3"]
RAGGED = [case(family, (*NAMED, *STATES)) for family in SERVED]
"""The engine's own tests have the logits of all of them too."""


def fields(family):
    return plain_config(tiny_model(family).config)


def spec(family):
    return spec_of(fields(family), page_tokens=16, dtype="float32")


class KeepingHost(Host):
    """Keeps a snapshot of one request after every other step, so that its state moves on."""

    def __init__(self, model, page_tokens):
        super().__init__(model, page_tokens, tokens=1024)
        self.steps = 0
        self.kept = []

    def run(self, *chunks, gate=None, sampled=None):
        logits = super().run(*chunks, gate=gate, sampled=sampled)
        self.steps += 1
        if self.steps % 2:
            snapshot = self.keep(chunks[0][0])
            for group in self.token_groups:
                pages = snapshot.pages[group.id]
                self.give_back(group, pages[pages >= 0])
            self.kept.append((snapshot, self.state_bytes(snapshot)))
        return logits

    def assert_nothing_kept_was_written(self):
        for snapshot, before in self.kept:
            for now, then in zip(self.state_bytes(snapshot), before, strict=True):
                assert (now == then).all()


@pytest.mark.parametrize("family", RAGGED)
def test_a_ragged_schedule_gives_the_familys_own_logits(family):
    host = KeepingHost(wrap(model_to_give_away(family)), 16)
    ragged_schedule(host, references(family), bound_of(family))
    host.assert_nothing_kept_was_written()


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_what_the_engine_cannot_run_is_refused_with_the_reason(family):
    try:
        reason = refusal(spec(family))
    except ConfigError as error:
        reason = str(error)
    assert reason is not None
    assert any(part in reason for part in REFUSED[family].split("|"))


@pytest.mark.parametrize("family", STATES)
def test_equal_chunks_side_by_side_give_the_familys_own_logits(family):
    host = Host(wrap(model_to_give_away(family)), 16, tokens=1024)
    wanted = references(family)
    rows = [host.open() for _ in wanted]
    texts = [[*prompt, *tokens] for prompt, tokens, _ in wanted]
    shortest = min(LENGTHS)
    host.run(*((row, text[:20]) for row, text in zip(rows, texts, strict=True)))
    logits = host.run(*((row, text[20:shortest]) for row, text in zip(rows, texts, strict=True)))
    ends = [LENGTHS.index(shortest)]
    assert_same(logits[ends], wanted[ends[0]][2][:1], bound_of(family))
    rest = [(r, text) for r, text in enumerate(texts) if len(text) > shortest + 20]
    for first in range(shortest, max(LENGTHS), 7):
        spans = [(r, text[first : min(first + 7, LENGTHS[r])]) for r, text in rest]
        spans = [(r, tokens) for r, tokens in spans if tokens]
        logits = host.run(*((rows[r], tokens) for r, tokens in spans))
        for at, (r, _) in enumerate(spans):
            if host.computed[rows[r]] == LENGTHS[r]:
                assert_same(logits[at], wanted[r][2][0], bound_of(family))


@pytest.mark.parametrize("end", [64, 77], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("family", RESUMED)
def test_a_resumed_snapshot_gives_the_familys_own_logits(family, end):
    host = Host(wrap(model_to_give_away(family)), 16, tokens=1024)
    prompt, tokens, logits = references(family)[2]
    first = host.open()
    host.run((first, prompt[:end]))
    snapshot = host.keep(first)
    before = host.state_bytes(snapshot)
    host.run((first, [7, *prompt[:40]]))
    host.close(first)
    # One that goes on in chunks, then one that decodes at once beside it.
    one, other = host.resume(snapshot), host.resume(snapshot)
    host.run((other, prompt[end : end + 1]), (one, prompt[end:90]))
    last = host.run((other, prompt[end + 1 : end + 2]), (one, prompt[90:]))[1]
    assert_same(last, logits[0], bound_of(family))
    host.run((other, prompt[end + 2 :]))
    both = host.run((one, tokens[:1]), (other, tokens[:1]))
    assert_same(both[0], logits[1], bound_of(family))
    assert_same(both[1], logits[1], bound_of(family))
    for now, then in zip(host.state_bytes(snapshot), before, strict=True):
        assert (now == then).all()


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h", "lfm2", "deepseek_v3"])
def test_half_precision_stays_near_the_float32_logits(family):
    host = Host(wrap(model_to_give_away(family).to(torch.bfloat16)), 16)
    row = host.open()
    (prompt, tokens, logits), *_ = references(family)
    host.run((row, prompt[:70]))
    mine = torch.cat([host.run((row, prompt[70:])), host.run((row, tokens[:1]))])
    assert mine.dtype == torch.float32
    assert (mine - logits[:2]).abs().max() < 0.25 * logits.abs().max()


def test_every_family_with_a_state_is_tried_and_stepped_ones_are_known():
    found = {family for family in SERVED if state_places(spec(family))}
    assert set(STATES) <= found
    for family in found:
        assert continues_token_by_token(fields(family)) == stepped(family)


def test_several_tokens_on_a_state_go_wrong_in_the_families_that_are_stepped(monkeypatch):
    """Hugging Face's own fault; when this fails, the family need not be stepped any more."""
    runs = "stratakv.engine.huggingface.runner.continues_token_by_token"
    monkeypatch.setattr(runs, lambda config: False)
    host = Host(wrap(model_to_give_away("jamba")), 16)
    (prompt, _, logits), *_ = references("jamba")
    row = host.open()
    host.run((row, prompt[:70]))
    wrong = host.run((row, prompt[70:]))[0]
    assert (wrong - logits[0]).abs().max() > 100 * TOLERANCE * logits.abs().max()

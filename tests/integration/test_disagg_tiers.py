"""What either side of a hand-off has in its store is not computed, or not sent, again; tenants stay
apart.
"""

from dataclasses import replace

import pytest

from stratakv.bench.rig import attach_files
from stratakv.cache.records import TierTokens
from stratakv.engine.request import Failure
from stratakv.testing.hand_off import HandOffSide
from stratakv.testing.patience import wait_until
from stratakv.testing.transport_faults import TransportFaults
from stratakv.tiers import progress
from tests.engines import expected_tokens, greedy, tokens_of
from tests.fixtures.transports import open_loopback
from tests.hand_off_campaign import SimLink
from tests.hit_cases import prompt
from tests.pairs import PAGE, PROMPT, RULES, every_rule, right
from tests.transport_pairs import Link, models_over, mooncake, settle, tcp, tokens_over

UNTIDY = TransportFaults(late=3, delay=2, parts=4)
PREFETCH = {"prefetch_threshold": 4, "prefetch_policy": "wait-complete"}
FAMILIES = (
    "llama", "gemma3", "gpt_oss", "qwen3_next", "deepseek_v3", "deepseek_v32", "deepseek_v4",
)  # fmt: skip
QUICK = {
    ("nixl", "llama", HandOffSide.PREFILL),
    ("mooncake", "gemma3", HandOffSide.DECODE),
    ("loopback", "qwen3_next", HandOffSide.DECODE),
}
CASES = [
    pytest.param(
        family, opened, side, id=f"{name}-{family}-{side.name}",
        marks=() if (name, family, side) in QUICK else pytest.mark.long,
    )
    for name, opened in {"loopback": open_loopback, "nixl": tcp, "mooncake": mooncake}.items()
    for family in FAMILIES
    for side in HandOffSide
]  # fmt: skip


@pytest.fixture(autouse=True)
def short_naps(monkeypatch):
    monkeypatch.setattr(progress, "POLL_S", 0.0005)


@every_rule
@pytest.mark.parametrize("side", HandOffSide)
def test_what_a_store_has_is_neither_computed_nor_sent(side, rules, tmp_path):
    with tokens_over(SimLink(1, UNTIDY), *rules, **PREFETCH) as pair:
        stored(pair, side, tmp_path, PROMPT[:40], expected_tokens)


@pytest.mark.parametrize(("family", "opened", "side"), CASES)
def test_nor_is_what_a_store_has_of_a_model(family, opened, side, tmp_path):
    with models_over(Link(opened, opened), family, **PREFETCH) as pair:
        tokens = prompt(PAGE, 8, 100)
        stored(pair, side, tmp_path, tokens, lambda asked, count: right(family, asked, count))


def stored(pair, side, path, tokens, expected):
    """The answer of ``tokens`` is in the store of that side alone; ``expected``: what is right."""
    parts = pair.sides[side]
    host = [arena.pages for arena in parts.arenas]
    attach_files(parts.engine, parts.spec, host, f"file://{path}?quota=64MiB")
    answer = expected(tokens, 20)  # over the end of a page, where a state can be stored
    assert pair.run(greedy("first", tokens, 20)) == [answer]
    for each in pair.sides.values():
        each.cache.progress.settle()
        wait_until(each.engine.flush, "a cache that is empty")
    asked = [*tokens, *answer, 3]
    assert pair.run(greedy("again", asked, 5)) == [expected(asked, 5)]
    cached = pair.outputs("again")[0].cached
    had = TierTokens(cached.device, cached.host, cached.storage)
    here, there = (had, cached.prefill) if side is HandOffSide.DECODE else (cached.prefill, had)
    assert (here.device, here.host) == (0, 0)
    assert here.storage > 0
    assert there == TierTokens(0, 0, 0)
    settle(pair)


@pytest.mark.parametrize("rules", [RULES["window"], RULES["all"]], ids=["window", "all"])
def test_tenants_share_no_page_on_either_side(rules):
    with tokens_over(SimLink(2, UNTIDY), *rules) as pair:
        for number, (salt, hit) in enumerate((("a", False), ("b", False), ("a", True))):
            asked = greedy(f"{number}", PROMPT[:41], 3, salt=salt)
            assert pair.run(asked) == [expected_tokens(PROMPT[:41], 3)]
            cached = pair.outputs(f"{number}")[0].cached
            assert (cached.prefill.device > 0) == hit
        settle(pair)


def test_a_prompt_of_another_tenant_or_session_fails_alone():
    with tokens_over(SimLink(3, UNTIDY)) as pair:
        for side, parts in pair.sides.items():
            pair.out[side]["r"] = []
            parts.engine.submit(replace(greedy("r", PROMPT[:30], 4), salt=side.name))
        pair.submit(greedy("s", PROMPT[:30], 4))
        pair.drain()
        assert pair.outputs("r")[-1].failure is Failure.TRANSFER
        assert tokens_of(pair.outputs("s")) == expected_tokens(PROMPT[:30], 4)
        settle(pair)

"""Adapters and tenants over a hand-off: what two engines say together is what PEFT's own model
says, and what is computed under one adapter, salt or way of choosing is given to no other."""

from dataclasses import replace

import pytest

from stratakv.engine.request import Failure, FinishReason, SamplingParams
from stratakv.testing.hand_off import HandOffSide
from stratakv.tiers import progress
from tests.engines import greedy, tokens_of
from tests.fixtures.lora import peft_oracle, save_adapter
from tests.fixtures.models import random_prompt, reference_greedy, tiny_model
from tests.fixtures.transports import open_loopback
from tests.transport_pairs import Link, models_over, mooncake, settle, tcp

OUTPUT = 5
OPENS = {"loopback": open_loopback, "nixl": tcp, "mooncake": mooncake}
QUICK = {("loopback", "gemma3"), ("nixl", "llama"), ("mooncake", "qwen3")}
CASES = [
    pytest.param(family, opened, id=f"{name}-{family}", marks=() if cheap else pytest.mark.long)
    for name, opened in OPENS.items()
    for family in ("llama", "gemma3", "qwen3")
    for cheap in [(name, family) in QUICK]
]


@pytest.fixture(autouse=True)
def short_naps(monkeypatch):
    monkeypatch.setattr(progress, "POLL_S", 0.0005)


def saved(path, family):
    narrow = {"target_modules": ["q_proj", "v_proj"], "r": 3}
    return {
        "a": save_adapter(path / "a", family, 1),
        "b": save_adapter(path / "b", family, 2, **narrow),
    }


@pytest.mark.parametrize(("family", "opened"), CASES)
def test_adapters_and_tenants_are_handed_over_as_one_engine_serves_them(family, opened, tmp_path):
    """The same prompt under all of them, side by side, and again from what each has cached."""
    adapters = saved(tmp_path, family)
    oracles = {name: peft_oracle(family, path) for name, path in adapters.items()}
    oracles[""] = tiny_model(family)
    prompt = random_prompt(1, 70)
    right = {name: reference_greedy(one, prompt, OUTPUT)[0] for name, one in oracles.items()}
    assert len({tuple(tokens) for tokens in right.values()}) == 3, "or nothing here could fail"
    kinds = [(name, salt) for name in oracles for salt in ("", "alice", "bob")]
    with models_over(Link(opened, opened), family, adapters=adapters) as pair:
        for turn, cached in enumerate((0, 64)):
            asked = [
                greedy(f"{turn}{name}{salt}", prompt, OUTPUT, salt, name) for name, salt in kinds
            ]
            generated = pair.run(*asked)
            assert generated == [right[name] for name, _ in kinds]
            had = [pair.outputs(one.id)[0].cached for one in asked]
            assert all(each.total + each.prefill.device == cached for each in had)
            pair.decode.engine.flush()
        settle(pair)


BASE = greedy("r", random_prompt(2, 40), 3)
CHOSEN = SamplingParams(max_tokens=3, temperature=0.7, seed=1)
OTHERS = {
    "adapter": (BASE, replace(BASE, adapter="a")),
    "another adapter": (replace(BASE, adapter="b"), replace(BASE, adapter="a")),
    "salt": (BASE, replace(BASE, salt="alice")),
    "another salt": (replace(BASE, salt="bob"), replace(BASE, salt="alice")),
    "tokens": (BASE, replace(BASE, tokens=BASE.tokens[::-1].copy())),
    "temperature": (BASE, replace(BASE, sampling=CHOSEN)),
    **{
        name: (
            replace(BASE, sampling=CHOSEN),
            replace(BASE, sampling=replace(CHOSEN, **{name: value})),
        )
        for name, value in {
            "seed": 2,
            "top_k": 5,
            "top_p": 0.5,
            "min_p": 0.1,
            "logprobs": 1,
        }.items()
    },
    "penalty": (BASE, replace(BASE, sampling=replace(BASE.sampling, repetition_penalty=1.5))),
    "bias": (BASE, replace(BASE, sampling=replace(BASE.sampling, logit_bias=((5, 1.0),)))),
    "least tokens": (
        replace(BASE, sampling=replace(BASE.sampling, stop_tokens=(7,))),
        replace(BASE, sampling=replace(BASE.sampling, stop_tokens=(7,), min_tokens=1)),
    ),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    adapters = saved(tmp_path_factory.mktemp("adapters"), "llama")
    with models_over(Link(), "llama", adapters=adapters) as found:
        yield found
        settle(found)


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("first", HandOffSide)
def test_what_would_have_another_first_token_is_never_paired(pair, what, first):
    """Both have one name, as where a router uses a room again."""
    asked = dict(zip(HandOffSide, OTHERS[what], strict=True))
    for side in sorted(HandOffSide, key=lambda each: each is not first):
        pair.out[side]["r"] = []
        pair.sides[side].engine.submit(asked[side])
    pair.drain()
    for side in HandOffSide:
        (out,) = pair.outputs("r", side)
        assert (out.finish, out.failure) == (FinishReason.ERROR, Failure.TRANSFER)
        assert "another prompt" in out.reason


def test_how_many_tokens_follow_keeps_nobody_apart(pair):
    """Some routers ask prefill for one; a greedy request has no use for a seed."""
    sampling = replace(BASE.sampling, max_tokens=1, seed=9, top_k=4)
    asked = {HandOffSide.PREFILL: replace(BASE, sampling=sampling), HandOffSide.DECODE: BASE}
    for side, one in asked.items():
        pair.out[side]["r"] = []
        pair.sides[side].engine.submit(one)
    pair.drain()
    assert (
        tokens_of(pair.outputs("r")) == reference_greedy(tiny_model("llama"), [*BASE.tokens], 3)[0]
    )

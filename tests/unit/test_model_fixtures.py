"""The tiny models have teeth: one wrong page of one group changes what they say.

Plain Hugging Face on both sides. Also the demo model's promises: small, and a chat turn extends the
prompt before it token for token.
"""

import copy
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache

from tests.fixtures.models import (
    FAMILIES,
    TOLERANCE,
    WINDOW,
    continue_greedily,
    model_to_give_away,
    prefill,
    random_prompt,
    reference_greedy,
    tiny_config,
    tiny_model,
)

PAGE = 16
PROMPT = 160
NEW = 12
PROMPTS = 8
GROUPS = [
    ("llama", "full"),
    ("qwen3", "full"),
    ("gemma3", "full"),
    ("gemma3", "sliding"),
    ("gpt_oss", "full"),
    ("gpt_oss", "sliding"),
]
DEMO = Path(__file__).parents[2] / "models" / "demo"


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def prefilled(family: str, seed: int) -> tuple[DynamicCache, torch.Tensor]:
    return prefill(tiny_model(family), random_prompt(seed, PROMPT))


@cache
def undisturbed(family: str, seed: int) -> tuple[list[int], torch.Tensor]:
    kv, logits = prefilled(family, seed)
    return continue_greedily(tiny_model(family), copy.deepcopy(kv), logits, PROMPT, NEW)


def page_of(layer, page: int) -> list[torch.Tensor]:
    """Views of K and V of one aligned page; a sliding layer holds only the prompt's end."""
    start = page * PAGE - (PROMPT - layer.keys.shape[-2])
    assert start >= 0
    return [states[:, :, start : start + PAGE] for states in (layer.keys, layer.values)]


def layers_of(kv: DynamicCache, group: str) -> list:
    return [layer for layer in kv.layers if layer.is_sliding == (group == "sliding")]


def put_page(kv: DynamicCache, page: int, source: DynamicCache, source_page: int, group: str):
    """Overwrite a page of every layer of the group, as one wrong block-table entry would."""
    for layer, other in zip(layers_of(kv, group), layers_of(source, group), strict=True):
        for states, wrong in zip(page_of(layer, page), page_of(other, source_page), strict=True):
            states.copy_(wrong.clone())


def wrong_page(family: str, group: str, seed: int, fault: str) -> DynamicCache:
    """A prefilled cache with one wrong page; every prompt gets it at another place."""
    kv = copy.deepcopy(prefilled(family, seed)[0])
    # Only two whole pages lie inside the window of a prompt of ten pages.
    page = 8 + seed % 2 if group == "sliding" else 1 + seed
    match fault:
        case "of another prompt":
            put_page(kv, page, prefilled(family, (seed + 1) % PROMPTS)[0], page, group)
        case "of the next position":
            put_page(kv, page, kv, page + 1 if page < 9 else page - 1, group)
    return kv


@pytest.mark.parametrize("fault", ["of another prompt", "of the next position"])
@pytest.mark.parametrize(("family", "group"), GROUPS)
def test_a_wrong_page_changes_tokens_and_logits(family, group, fault):
    changed = 0
    for seed in range(PROMPTS):
        tokens, logits = undisturbed(family, seed)
        got = fed(family, wrong_page(family, group, seed, fault), tokens[:-1])
        differs = got.argmax(-1) != torch.tensor(tokens[1:])
        difference = (got - logits[1:])[: first(differs) + 1].abs().max()
        large = difference > 1000 * TOLERANCE * logits.abs().max()
        changed += bool(differs.any() and large)
    assert changed >= 7


def fed(family: str, kv: DynamicCache, tokens: list[int]) -> torch.Tensor:
    """Logits [n, vocab] after each of the tokens, in one call.

    Up to and including the first row that wants another token than the fed one they are those of a
    greedy run; later ones differ merely because the inputs do.
    """
    positions = torch.arange(PROMPT, PROMPT + len(tokens))[None]
    with torch.no_grad():
        output = tiny_model(family)(
            torch.tensor([tokens]), position_ids=positions, past_key_values=kv
        )
    return output.logits[0]


def first(differs: torch.Tensor) -> int:
    """Index of the first true row, of the last row if none is."""
    return int(differs.int().argmax()) if differs.any() else len(differs) - 1


def test_the_right_pages_give_the_greedy_tokens():
    for family, group in GROUPS:
        kv = copy.deepcopy(prefilled(family, 0)[0])
        put_page(kv, 9, prefilled(family, 0)[0], 9, group)
        tokens, logits = undisturbed(family, 0)
        got = fed(family, kv, tokens[:-1])
        assert got.argmax(-1).tolist() == tokens[1:]
        assert (got - logits[1:]).abs().max() <= TOLERANCE * logits.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_does_not_collapse(family):
    for seed in range(PROMPTS):
        assert len(set(undisturbed(family, seed)[0])) >= 6


def test_exchanging_two_pages_of_one_prompt_is_invisible_to_full_layers():
    # Keys carry their position, attention is a sum: no test can see this fault, so none may rely
    # on it. It is why the faults above bring a page that does not belong or bring one twice.
    kv, before = copy.deepcopy(prefilled("llama", 0)[0]), prefilled("llama", 0)[0]
    put_page(kv, 3, before, 6, "full")
    put_page(kv, 6, before, 3, "full")
    tokens, logits = undisturbed("llama", 0)
    got = fed("llama", kv, tokens[:-1])
    assert got.argmax(-1).tolist() == tokens[1:]
    assert (got - logits[1:]).abs().max() <= TOLERANCE * logits.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_agrees_with_one_pass_without_a_cache(family):
    prompt = random_prompt(0, PROMPT)
    tokens, logits = reference_greedy(tiny_model(family), prompt, 4)
    with torch.no_grad():
        whole = tiny_model(family)(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
    expected = whole[PROMPT - 1 :]
    assert expected.argmax(-1).tolist() == tokens
    assert (expected - logits).abs().max() <= TOLERANCE * logits.abs().max()


def test_experts_are_never_tied():
    gaps = []

    def remember(_module, _inputs, outputs):
        ranked = outputs[0].sort(descending=True).values
        gaps.append((ranked[:, 1] - ranked[:, 2]).min())

    model = model_to_give_away("gpt_oss")
    for layer in model.model.layers:
        layer.mlp.router.register_forward_hook(remember)
    for seed in range(PROMPTS):
        prefill(model, random_prompt(seed, PROMPT))
    assert len(gaps) == PROMPTS * len(model.model.layers)
    assert min(gaps) > TOLERANCE


def test_weights_are_the_same_for_a_seed_and_shared_with_nobody():
    model, other = tiny_model("gemma3"), model_to_give_away("gemma3")
    tiny_model.cache_clear()
    again, different = tiny_model("gemma3"), tiny_model("gemma3", 1)
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = model.get_parameter(name)
    assert torch.equal(weight, again.get_parameter(name))
    assert torch.equal(weight, other.get_parameter(name))
    assert weight.data_ptr() != other.get_parameter(name).data_ptr()
    assert not torch.equal(weight, different.get_parameter(name))


def test_the_reference_refuses_a_model_that_an_engine_took_over():
    model = model_to_give_away("llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(AssertionError, match="untouched"):
        reference_greedy(model, random_prompt(0, 4), 1)


def test_several_pages_fit_behind_the_window_and_no_page_edge_falls_on_it():
    for family in ("gemma3", "gpt_oss"):
        assert tiny_config(family).sliding_window == WINDOW
    assert PROMPT > WINDOW + 4 * PAGE
    assert WINDOW % PAGE


def test_an_unknown_family_is_named():
    with pytest.raises(ValueError, match="'bert'"):
        tiny_config("bert")


def test_the_demo_model_is_small_enough_to_commit():
    assert sum(path.stat().st_size for path in DEMO.iterdir()) < 5_000_000


@pytest.mark.parametrize(
    "text", ["", " ", "Grüße  aus\n\tKöln", "東京 👩‍👩‍👧\r\n", "\x00\ufeff\u200b"]
)
def test_the_demo_tokenizer_gives_every_text_back(text):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("answer", ["Split the string.", " spaces and\n", "東京 👍🏽", ""])
@pytest.mark.parametrize("system", ["", "You answer questions about Python."])
def test_a_demo_chat_turn_extends_the_prompt_before_it_token_for_token(system, answer):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    chat = [{"role": "system", "content": system}] if system else []
    chat.append({"role": "user", "content": "What does shlex.split do?"})
    answered = [*chat, {"role": "assistant", "content": answer}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    ids = tokenizer.encode(answer, add_special_tokens=False)
    whole = tokenizer.apply_chat_template(answered)["input_ids"]
    assert whole == [*prompt, *ids, tokenizer.eos_token_id]
    follow_up = [*answered, {"role": "user", "content": "Tell me more."}]
    longer = tokenizer.apply_chat_template(follow_up, add_generation_prompt=True)["input_ids"]
    assert longer[: len(whole)] == whole

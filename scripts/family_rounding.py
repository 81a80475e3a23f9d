"""Measures what each family loses to float32: the engine, and Hugging Face by itself.

`python -m scripts.family_rounding [FAMILY ...]` prints a line per family and kind of weights, of
families that are named with several seeds. The bounds in `tests/fixtures/bounds.py` were chosen
from it. Owns the measurement. Must not know what is allowed.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from scripts.family_table import exact
from stratakv.engine.huggingface.model import wrap
from stratakv.engine.huggingface.model_facts import plain_config
from stratakv.spec.support import continues_token_by_token, time_steps_of
from tests.fixtures.models import changed_model, forward, forward_rows, random_prompt, uncached
from tests.fixtures.runner_host import Host
from tests.fixtures.tiny_configs import tiny_config

TOKENS: Final = 112
PROMPTS: Final = 2
SEEDS: Final = 3
CUTS: Final = ((TOKENS - 9, *(1,) * 9), (40, 1, 23, 1, 16, 2, TOKENS - 83), (16,) * 7)
"""How the engine gets a prompt."""
OTHERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gpt2": {"scale_attn_weights": False},
    "gpt_bigcode": {"scale_attn_weights": False},
    "gemma4_text": {"attention_k_eq_v": False},
    "gemma4_unified_text": {"attention_k_eq_v": False},
    "olmo_hybrid": {"linear_allow_neg_eigval": False},
    "bailing_hybrid": {"kda_safe_gate": False},
    "zamba2": {"time_step_min": 0.001},
    "nemotron_h": {"time_step_min": 0.001},
}
"""Configurations beside the fixtures' that round otherwise."""


class Double(TorchFunctionMode):
    """Where code asks for float32, however it asks, it gets float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = [torch.float64 if arg is torch.float32 else arg for arg in args]
        named = {
            name: torch.float64 if value is torch.float32 else value
            for name, value in (kwargs or {}).items()
        }
        return func(*wide, **named)


def models(family: str, seeds: int) -> Iterator[tuple[str, PreTrainedModel]]:
    """Weights that make every page matter, and those that Hugging Face draws for training."""
    for seed in range(seeds):
        yield f"seed {seed}", changed_model(family, seed)
        if family in OTHERS:
            yield f"other config, seed {seed}", changed_model(family, seed, **OTHERS[family])
    torch.manual_seed(0)
    drawn = AutoModelForCausalLM.from_config(
        tiny_config(family), dtype=torch.float32, attn_implementation="eager"
    )
    yield "as drawn", drawn.eval().requires_grad_(requires_grad=False)


@torch.no_grad()
def measure(model: PreTrainedModel) -> tuple[float, float, float, float]:
    """Largest differences of two logits, as parts of the largest logit: float32 from float64 in
    one forward; Hugging Face's float32 from itself at another batch shape and other cuts; the
    engine from float64; the engine from Hugging Face's float32."""
    prompts = [random_prompt(seed, TOKENS) for seed in range(PROMPTS)]
    single = torch.stack([uncached(model, prompt) for prompt in prompts])
    double = copy.deepcopy(model).double()
    double.set_experts_implementation("eager")
    with Double():
        exactly = torch.stack([uncached(double, prompt) for prompt in prompts])
    scale = float(exactly.abs().max())
    together = forward_rows(model, DynamicCache(config=model.config), prompts, 0, keep=0)
    itself = [float((together - single).abs().max())]
    for cuts in _own_cuts(model):
        kv, at = DynamicCache(config=model.config), 0
        for count in cuts:
            last = forward(model, kv, prompts[0][at : at + count], at)[-1]
            at += count
            itself.append(float((last - single[0, at - 1]).abs().max()))
    host, from_double, from_single = Host(wrap(copy.deepcopy(model)), 16), 0.0, 0.0
    for prompt, (ids, wanted, true) in enumerate(zip(prompts, single, exactly, strict=True)):
        for cuts in CUTS[: 2 - prompt]:
            row, at = host.open(), 0
            for count in cuts:
                (found,) = host.run((row, ids[at : at + count]))
                at += count
                from_single = max(from_single, float((found - wanted[at - 1]).abs().max()))
                from_double = max(from_double, float((found - true[at - 1]).abs().max()))
            host.close(row)
    found_in = (float((single - exactly).abs().max()), max(itself), from_double, from_single)
    return found_in[0] / scale, found_in[1] / scale, found_in[2] / scale, found_in[3] / scale


def _own_cuts(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """Those of ``CUTS`` that Hugging Face's own cache computes as its forward does."""
    config = plain_config(model.config)
    if continues_token_by_token(config):
        return [CUTS[0]]
    return [CUTS[2]] if time_steps_of(config) is not None else [*CUTS]


def main(families: Sequence[str]) -> int:
    torch.set_num_threads(1)
    print("family, weights, HF from float64, HF from itself, engine from float64, from HF")
    for family in families or exact():
        for weights, model in models(family, SEEDS if families else 1):
            shown = " ".join(f"{value:.1e}" for value in measure(model))
            print(f"{family} {weights.replace(', ', '-').replace(' ', '-')} {shown}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

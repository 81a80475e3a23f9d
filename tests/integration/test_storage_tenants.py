"""One directory, many tenants: salts, adapters, models, page sizes and dtypes never share a page,
also across a restart, and all of them live within one quota.
"""

import pytest
import torch

from stratakv.core.config import EngineConfig
from stratakv.engine.huggingface.model import with_adapters, wrap
from stratakv.spec.derive import spec_of
from tests.engines import drain, greedy, on_device, on_storage, run, small_engine, tokens_of
from tests.fixtures.lora import peft_oracle, save_adapter
from tests.fixtures.models import model_to_give_away, reference_greedy, tiny_model
from tests.hit_cases import last_end, prompt
from tests.storage_cases import (
    PATIENT,
    attach,
    evict_all,
    file_url,
    lost,
    of_each,
    settled,
    shelf_for,
    shelf_lab,
    storage_lab,
)

PAGE = 16
TOKENS = prompt(PAGE, 1)
END = last_end(len(TOKENS), PAGE)
OUTPUT = 4


@of_each()
def test_a_salt_hits_its_own_pages_alone(family):
    shelf = shelf_for(family, PAGE)
    with shelf_lab(family, PAGE, shelf) as this:
        assert this.ask(TOKENS, salt="a").cached == on_device(this.spec, 0)
        assert this.ask(TOKENS).cached == on_device(this.spec, 0)
    with shelf_lab(family, PAGE, shelf) as this:
        for salt, end in (("b", 0), ("a", END), ("", END), ("A", 0)):
            assert this.ask(TOKENS, salt=salt).cached == on_storage(this.spec, end), salt
        assert lost(this) == {}


# -- adapters --------------------------------------------------------------------------------------


def adapted(directory, family, adapters):
    """What every adapter in ``adapters`` (name to saved directory) was given of the prompt by an
    engine over the store at ``directory``, each answer compared with PEFT's."""
    model = with_adapters(wrap(model_to_give_away(family)), adapters)
    config = EngineConfig(
        page_tokens=PAGE, max_running=4, max_model_len=512, chunk_tokens=40, step_tokens=88,
        **PATIENT,
    )  # fmt: skip
    spec = spec_of(model.config, page_tokens=PAGE, dtype=model.dtype)
    pages = (128,) * len(spec.groups)
    oracles = {name: peft_oracle(family, path) for name, path in adapters.items()}
    found = {}
    with small_engine(model, config, pages, pages) as parts:
        attach(parts, file_url(directory))
        for name, oracle in {"": tiny_model(family), **oracles}.items():
            outputs = run(parts, greedy(f"r{name}", TOKENS, OUTPUT, adapter=name))[f"r{name}"]
            assert tokens_of(outputs) == reference_greedy(oracle, TOKENS, OUTPUT)[0], name
            found[name] = outputs[0].cached.storage
            assert outputs[0].cached.total == found[name]
        parts.cache.progress.settle()
    return found


@of_each(("llama", "gemma3"))
def test_an_adapter_hits_its_own_pages_alone(family, tmp_path):
    torch.set_num_threads(1)
    a, b = (save_adapter(tmp_path / name, family, at) for at, name in enumerate("ab"))
    store = tmp_path / "store"
    store.mkdir()
    assert adapted(store, family, {"a": a}) == {"": 0, "a": 0}
    assert adapted(store, family, {"a": a, "b": b}) == {"": END, "a": END, "b": 0}
    # A name is no identity: the weights are.
    assert adapted(store, family, {"a": b, "c": a}) == {"": END, "a": END, "c": END}
    other = save_adapter(tmp_path / "other", family, 5)
    assert adapted(store, family, {"a": other}) == {"": END, "a": 0}


# -- other models and layouts ----------------------------------------------------------------------


def given(model, page, directory) -> int:
    """Tokens that storage gave an engine over ``model``."""
    config = EngineConfig(
        page_tokens=page, max_running=4, max_model_len=512, chunk_tokens=48, step_tokens=96,
        **PATIENT,
    )  # fmt: skip
    taken = wrap(model)
    groups = len(spec_of(taken.config, page_tokens=page, dtype=taken.dtype).groups)
    with small_engine(taken, config, (128,) * groups, (128,) * groups) as parts:
        attach(parts, file_url(directory))
        parts.engine.submit(greedy("r", TOKENS, OUTPUT))
        outputs = drain(parts)
        parts.cache.progress.settle()
        stats = parts.engine.storage_stats()
        assert stats.pages["stored"] or outputs[0].cached.storage
        assert outputs[0].cached.total == outputs[0].cached.storage
        return outputs[0].cached.storage


def test_another_model_dtype_or_page_size_hits_nothing(tmp_path):
    torch.set_num_threads(1)
    strangers = [
        lambda: (model_to_give_away("llama"), 16),
        lambda: (model_to_give_away("llama", seed=1), 16),  # only its weights are others
        lambda: (model_to_give_away("llama").to(torch.bfloat16), 16),
        lambda: (model_to_give_away("llama"), 8),
        lambda: (model_to_give_away("llama"), 32),
        lambda: (model_to_give_away("qwen3"), 16),
        lambda: (model_to_give_away("gemma3"), 16),
    ]
    for stranger in strangers:
        assert given(*stranger(), tmp_path) == 0
    for stranger in strangers:  # and each of them still has its own
        model, page = stranger()
        assert given(model, page, tmp_path) == last_end(len(TOKENS), page)


@pytest.mark.parametrize("turns", [1, pytest.param(3, marks=pytest.mark.long)])
def test_all_of_them_share_one_quota(turns, tmp_path):
    quota = 4 << 20

    def physical() -> int:
        return sum(path.stat().st_blocks * 512 for path in tmp_path.glob("*.seg"))

    for _ in range(turns):
        for family, page in (("llama", 16), ("gemma3", 16), ("llama", 64)):
            with storage_lab(family, page, file_url(tmp_path, quota="4MiB")) as this:
                for seed in range(2):
                    this.ask(prompt(page, 30 + seed))
                    assert physical() <= quota
                settled(this)
                evict_all(this)
                answer = this.ask(prompt(page, 31))
                assert answer.cached.total == answer.cached.storage
            assert physical() <= quota
    assert physical() > quota // 4, "too little to prove anything"


@of_each()
def test_two_engines_share_what_either_has_stored_while_both_run(family, tmp_path):
    """The other one has opened the store before there was anything in it."""
    url = file_url(tmp_path)
    other = prompt(PAGE, 2)
    with storage_lab(family, PAGE, url) as one, storage_lab(family, PAGE, url) as two:
        two.ask(prompt(PAGE, 5, 20))
        settled(two)
        one.ask(TOKENS)
        settled(one)
        assert two.ask(TOKENS).cached == on_storage(two.spec, END)
        two.ask(other)
        settled(two)
        assert one.ask(other).cached == on_storage(one.spec, END)
        for this in (one, two):
            evict_all(this)
        one.submit("a", TOKENS)
        two.submit("a", TOKENS)
        for this in (one, two):
            this.drain()
            assert this.answers["a"].cached == on_storage(this.spec, END)
            assert lost(this) == {}

"""``stratakv doctor ENGINE --why-miss``: which page or which setting stops a prompt's reuse. Block
hashes are made by the engines' own functions (``connect/*_hashes``); others stand for them here.
"""

import hashlib
import json
import sys
from types import ModuleType

import pytest

from stratakv.cli import main
from stratakv.connect.namespace_records import load_records, records_directory
from stratakv.connect.why_miss import AskedPrompt
from tests.fixtures import fake_sglang, fake_vllm
from tests.fixtures.fake_vllm import make_offload_key
from tests.unit.test_connect_vllm import Manager, checkpoint

pytestmark = pytest.mark.usefixtures("no_toolkit")
PROMPT = list(range(100))
WINDOW = "SlidingWindowSpec(sliding_window=64)"


def hashes(prompt, hash_tokens, hash_name):
    """Chained, as an engine's are."""
    tokens, apart = prompt.tokens, f"{prompt.cache_salt} {prompt.extra_key}"
    ends = range(hash_tokens, len(tokens) + 1, hash_tokens)
    return [hashlib.sha256(f"{hash_name} {apart} {tokens[:end]}".encode()).digest() for end in ends]


@pytest.fixture(autouse=True)
def records(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for engine in ("vllm", "sglang"):
        made = ModuleType(f"stratakv.connect.{engine}_hashes")
        made.block_hashes = hashes
        monkeypatch.setitem(sys.modules, made.__name__, made)


@pytest.fixture
def model(tmp_path):
    return checkpoint(tmp_path / "model")


@pytest.fixture
def storage(tmp_path):
    return f"file://{tmp_path}/store?quota=16MiB"


@pytest.fixture
def start(monkeypatch, model, storage):
    """Starts vLLM's side, stores blocks of the prompt by group, and ends it."""
    adapter = fake_vllm.install(monkeypatch)

    def start(full=(), window=(), salt=None, **changes):
        manager = Manager(adapter, model, storage, **changes)
        blocks = hashes(AskedPrompt(tokens=PROMPT, cache_salt=salt), 32, "sha256")
        keys = [make_offload_key(blocks[at], 0) for at in full]
        keys += [make_offload_key(blocks[at], 1) for at in window]
        if keys:
            assert manager.store(keys, range(len(keys))).success
        manager.end()

    return start


@pytest.fixture
def why(tmp_path, storage, capsys):
    def why(engine="vllm", prompt=PROMPT, url=storage):
        file = tmp_path / "prompt.json"
        file.write_text(json.dumps(prompt))
        code = main(["doctor", engine, "model", "--storage", url, "--why-miss", str(file)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return why


def test_a_prompt_that_is_there_is_not_stopped(start, why):
    start(full=range(3), window=range(3))
    code, text = why()
    assert code == 0
    assert "96 tokens could be reused" in text
    assert "all of 100 tokens that could be reused" in text


def test_the_page_of_the_group_that_stops_it_is_named(start, why):
    start(full=[0, 1, 2], window=[0, 1])
    _, text = why()
    assert "64 tokens could be reused" in text
    assert "stopped by page 2 of group 1, 2 layers (tokens 64 to 95)" in text
    assert "of group 0" not in text


def windows(monkeypatch, kept=0):
    """Every group is a window of 64 tokens; of ``kept`` more, where vLLM drafts."""
    fields = {"sliding_window": 64, "extra_retained_tokens": kept}
    monkeypatch.setattr(fake_vllm, "Spec", type("SlidingWindowSpec", (fake_vllm.Spec,), fields))


def test_where_vllm_drafts_a_window_needs_a_page_more(start, why, monkeypatch):
    windows(monkeypatch, kept=2)
    start(full=[0, 1, 2], window=[1, 2])
    (record,) = load_records("vllm")
    assert [part.trailing for part in record.parts] == [3, 3]
    _, text = why()
    assert "0 tokens could be reused" in text
    assert "stopped by page 0 of group 1" in text
    windows(monkeypatch, kept=1)
    start()
    assert [part.trailing for part in load_records("vllm")[0].parts] == [2, 2]


def test_of_a_window_the_page_is_named_that_the_longest_prefix_lacks(start, why, monkeypatch):
    windows(monkeypatch)
    start(full=range(3), window=[2])  # nobody keeps page 0 of a window of two pages
    _, text = why()
    assert "stopped by page 1 of group 1" in text
    assert "page 0" not in text


def test_a_window_needs_its_last_pages_alone(start, why, monkeypatch):
    windows(monkeypatch)
    start(full=[0, 1, 2], window=[1, 2])
    (record,) = load_records("vllm")
    assert [part.trailing for part in record.parts] == [2, 2]
    start(full=[1, 2])
    assert "96 tokens could be reused" in why()[1]


def test_the_setting_that_differs_is_named(start, why):
    start(full=range(3), window=range(3))
    start(dtype="torch.bfloat16")
    _, text = why()
    assert "(the last start" in text
    assert "0 tokens could be reused" in text
    assert "dtype: 'torch.float32' there, 'torch.bfloat16' now" in text
    assert text.count("differs in") == 1 + text.count("differs in kv_dtype")


def test_long_settings_are_shown_from_where_they_part(start, why):
    start(full=range(3), window=range(3))
    start(specs=("FullAttentionSpec(block_size=32)", "SlidingWindowSpec(sliding_window=32)"))
    _, text = why()
    assert "sliding_window=64" in text
    assert "sliding_window=32" in text


def test_a_page_that_no_start_has_is_named_so(start, why):
    start()
    assert "no other start of this machine has more of it" in why()[1]


def test_starts_over_another_store_do_not_count(start, why, tmp_path):
    start(full=range(3), window=range(3))
    code, text = why(url=f"file://{tmp_path}/elsewhere?quota=16MiB")
    assert code == 2
    assert "no start of vllm" in text


def test_a_prompt_is_looked_for_under_its_salt(start, why):
    start(full=range(3), window=range(3), salt="Ada")
    salted = {"prompt": PROMPT, "cache_salt": "Ada"}
    assert "96 tokens could be reused" in why(prompt=salted)[1]
    for other in (PROMPT, {**salted, "cache_salt": "Ben"}, {**salted, "extra_key": "x"}):
        text = why(prompt=other)[1]
        assert "): 0 tokens could be reused" in text
        assert "without its salt" not in text
        assert "stopped by page 0" in text


def test_what_others_have_stored_without_a_salt_is_named(start, why):
    start(full=range(3), window=range(3))
    text = why(prompt={"prompt": PROMPT, "cache_salt": "Ada"})[1]
    assert "): 0 tokens could be reused" in text
    assert "without its salt and key 96 tokens could be reused" in text


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt": PROMPT, "salt": "Ada"}, "salt: allowed are prompt, cache_salt, extra_key"),
        ({"prompt": PROMPT, "cache_salt": 7}, "cache_salt 7: allowed is text"),
    ],
)
def test_a_field_that_no_request_has_is_refused(start, why, prompt, words):
    start()
    code, text = why(prompt=prompt)
    assert code == 2
    assert words in text


@pytest.mark.parametrize("prompt", [{}, ["a"], [1.5], [True]])
def test_what_is_no_prompt_is_refused(start, why, prompt):
    start()
    code, text = why(prompt=prompt)
    assert code == 2
    assert "allowed is JSON, a list of token ids" in text


def test_an_engine_that_is_not_here_is_refused(start, why, monkeypatch):
    start()
    monkeypatch.setitem(sys.modules, "stratakv.connect.vllm_hashes", None)
    code, text = why()
    assert code == 2
    assert "allowed where vllm is installed" in text


def test_records_of_others_and_of_nobody_are_left_out(start):
    start()
    (records_directory() / "broken.json").write_text("{")
    (records_directory() / "other.json").write_text('{"engine": "vllm"}')
    assert len(load_records("vllm")) == 1
    assert load_records("sglang") == []


def test_a_record_that_cannot_be_written_leaves_nothing_behind(start, monkeypatch, quiet):
    start()
    before = sorted(records_directory().iterdir())

    def full(record, file):
        file.write("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stratakv.connect.namespace_records.json.dump", full)
    start(dtype="torch.bfloat16")
    assert sorted(records_directory().iterdir()) == before


def test_a_record_that_another_engine_removes_meanwhile_is_left_out(start):
    start()
    (records_directory() / "gone.json").symlink_to("nowhere")
    assert len(load_records("vllm")) == 1


def test_without_a_place_for_records_an_engine_starts(start, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    start(full=range(3))
    assert load_records("vllm") == []


def test_a_pool_of_sglang_that_lacks_its_last_page_is_named(monkeypatch, why, model, storage):
    adapter = fake_sglang.install(monkeypatch, fake_sglang.arguments(model))
    backend = adapter.StrataStorage(fake_sglang.storage_config(storage), {})
    pool, window = fake_sglang.Pool(), fake_sglang.Pool(width=3)
    backend.register_mem_pool_host(pool)
    backend.register_mem_host_pool_v2(window, fake_sglang.PoolName.SWA)
    # SGLang's keys are text; the stand-in's hashes come as what is hashed of it.
    monkeypatch.setattr(
        sys.modules["stratakv.connect.sglang_hashes"], "block_hashes",
        lambda *given: [block.hex().encode() for block in hashes(*given)],
    )  # fmt: skip
    keys = [block.hex() for block in hashes(AskedPrompt(tokens=PROMPT[:16]), 4, "sha256")]
    assert backend.batch_set_v1(keys, pool.indices(0, 1, 2, 3)) == [True] * 4
    asked = fake_sglang.PoolTransfer(fake_sglang.PoolName.SWA, window.indices(1), keys[1:2])
    assert backend.batch_set_v2([asked]) == {"swa": [True]}
    backend.close()
    _, text = why("sglang", PROMPT[:16])
    assert "8 tokens could be reused" in text
    assert "stopped by page 2 of pool swa (tokens 8 to 11)" in text


def test_a_dtype_of_states_from_the_environment_is_named(monkeypatch, why, model, storage):
    monkeypatch.setattr(
        sys.modules["stratakv.connect.sglang_hashes"], "block_hashes",
        lambda *given: [block.hex().encode() for block in hashes(*given)],
    )  # fmt: skip
    keys = [block.hex() for block in hashes(AskedPrompt(tokens=PROMPT[:16]), 4, "sha256")]
    for dtype in ("bfloat16", "float16"):
        monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", dtype)
        adapter = fake_sglang.install(monkeypatch, fake_sglang.arguments(model))
        backend = adapter.StrataStorage(fake_sglang.storage_config(storage), {})
        pool = fake_sglang.Pool()
        backend.register_mem_pool_host(pool)
        if dtype == "bfloat16":
            assert backend.batch_set_v1(keys, pool.indices(0, 1, 2, 3)) == [True] * 4
        backend.close()
    _, text = why("sglang", PROMPT[:16])
    assert "differs in SGLANG_MAMBA_CONV_DTYPE: 'bfloat16' there, 'float16' now" in text

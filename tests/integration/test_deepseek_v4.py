"""Our DeepSeek-V4 on our pages against Hugging Face at batch 1: the same logits.

Pages are handed out in random order and taken back as soon as the rule lets go of them; everything
that no request owns is NaN, and so is the page of open blocks at every page boundary.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stratakv.core.errors import ConfigError
from stratakv.core.ids import LayerId
from stratakv.engine.attention import scratch_limit
from stratakv.engine.deepseek import v4_queries
from stratakv.engine.deepseek.v4_model import V4Model
from stratakv.engine.huggingface.model import load_model
from tests.fixtures.deepseek_v4 import (
    NARROW,
    SHORT,
    TOLERANCE,
    V4Host,
    adopted,
    hugging_face,
    prompt_of,
    reference,
)

LONG = pytest.mark.long
SEEDS = [0, 1, *(pytest.param(seed, marks=LONG) for seed in (2, 3, 4, 5))]
"""The plain sizes, and drawn ones with and, in `make test-long`, without what every other seed
has."""
AROUND = sorted({n + d for n in (4, 8, 128, 132, 256, 300) for d in (-1, 0, 1)} | {1, 2, 97})
LENGTH = 301
PAGED = [
    *((seed, 128) for seed in (0, 1)),
    *(pytest.param(seed, 128, marks=LONG) for seed in (2, 3, 4, 5)),
    pytest.param(0, 256, marks=LONG),
    (1, 256),
    (SHORT, 16),
    pytest.param(SHORT, 48, marks=LONG),
    (NARROW, 16),
]


def assert_near(mine, theirs):
    assert torch.isfinite(mine).all()
    assert (mine - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_prompt_of_any_length_gives_hugging_faces_logits(seed):
    theirs, prompt, host = (
        reference(seed, 0, LENGTH),
        prompt_of(seed, 0, LENGTH),
        V4Host(adopted(seed)),
    )
    for length in AROUND:
        row, mine = host.feed(prompt[:length])
        assert_near(mine, theirs[length - 1])
        host.close(row)


@pytest.mark.parametrize("seed", SEEDS)
def test_decoding_gives_hugging_faces_logits_at_every_length(seed):
    theirs, prompt, host = (
        reference(seed, 0, LENGTH),
        prompt_of(seed, 0, LENGTH),
        V4Host(adopted(seed)),
    )
    row = host.open()
    mine = torch.cat([host.run((row, prompt[at : at + 1])) for at in range(LENGTH)])
    assert_near(mine, theirs)


@pytest.mark.parametrize(("seed", "page_tokens"), PAGED)
def test_any_chunks_are_one_chunk(seed, page_tokens):
    length = 560
    theirs, prompt = reference(seed, 1, length), prompt_of(seed, 1, length)
    host = V4Host(adopted(seed), page_tokens)
    random = np.random.default_rng(seed)
    for most in (9, 60, 300):
        ends = np.cumsum(random.integers(1, most + 1, length))
        row = host.open()
        for end in sorted({1, 5, 127, 128, 131, 256, length, *ends[ends < length].tolist()}):
            mine = host.run((row, prompt[host.computed[row] : end]))[0]
            assert_near(mine, theirs[end - 1])
        host.close(row)


@pytest.mark.parametrize("pieces", ["large", "small"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_ragged_batch_gives_every_request_its_own_logits(seed, pieces, monkeypatch):
    """Half of what is left decodes in a step, the rest computes up to 150 tokens, some nothing."""
    if pieces == "small":
        monkeypatch.setattr(v4_queries, "MOST_QUERIES", 16)
        monkeypatch.setattr(scratch_limit, "SCRATCH_BYTES", 4096)
        monkeypatch.setattr(v4_queries, "SLACK_KEYS", 1)
    lengths = (300, 131, 260, 33, 5, 129, 257, 2)
    prompts = [prompt_of(seed, *case) for case in enumerate(lengths)]
    theirs = [reference(seed, *case) for case in enumerate(lengths)]
    host, random = V4Host(adopted(seed)), np.random.default_rng(seed)
    rows = [host.open() for _ in prompts]
    while not all(host.computed[row] == n for row, n in zip(rows, lengths, strict=True)):
        step = []
        for i, row in enumerate(rows):
            count = random.choice([0, 1, 1, int(random.integers(2, 150))])
            chunk = prompts[i][host.computed[row] :][:count]
            step += [(len(chunk) > 1, i, chunk)] if len(chunk) else []
        step.sort(key=lambda part: part[0])
        if step:
            mine = host.run(*[(rows[i], chunk) for _, i, chunk in step])
            for (_, i, _), logits in zip(step, mine, strict=True):
                assert_near(logits, theirs[i][host.computed[rows[i]] - 1])


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_that_close_a_block_decode_beside_rows_that_do_not(seed):
    theirs, prompt, host = (
        reference(seed, 0, LENGTH),
        prompt_of(seed, 0, LENGTH),
        V4Host(adopted(seed)),
    )
    starts = [*range(1, 7), *range(124, 134)]
    rows = [host.feed(prompt[:start])[0] for start in starts]
    for step in range(3):
        mine = host.run(*[(row, prompt[host.computed[row] :][:1]) for row in rows])
        assert_near(mine, theirs[[start + step for start in starts]])


@pytest.mark.parametrize(("seed", "page_tokens"), PAGED)
def test_pages_alone_are_enough_at_every_page_boundary(seed, page_tokens):
    length = 560
    theirs, prompt = reference(seed, 1, length), prompt_of(seed, 1, length)
    host = V4Host(adopted(seed), page_tokens)
    row = host.open()
    for boundary in range(page_tokens, length, page_tokens):
        host.go_on(row, prompt[:boundary])
        for end in (boundary + 1, boundary + 6, length):
            other = host.fork(row)
            assert_near(host.go_on(other, prompt[:end]), theirs[end - 1])
            host.close(other)


@pytest.mark.parametrize(("seed", "page_tokens"), PAGED)
def test_a_chunk_leaves_pages_that_are_enough_at_every_boundary_inside_it(
    seed, page_tokens, monkeypatch
):
    length = 560
    theirs, prompt = reference(seed, 1, length), prompt_of(seed, 1, length)
    host = V4Host(adopted(seed), page_tokens)
    monkeypatch.setattr(host, "release_unneeded", lambda row: None)
    row, _ = host.feed(prompt)
    for boundary in range(page_tokens, length, page_tokens):
        for end in (boundary + 1, boundary + 6):
            other = host.fork(row, boundary)
            assert_near(host.go_on(other, prompt[:end]), theirs[end - 1])
            host.close(other)


BUFFERS = ("c4", "c4_index_k", "c128", "latent", "c4_overlap", "c4_index_overlap")


@pytest.mark.parametrize("name", BUFFERS)
def test_every_buffer_matters_at_a_page_boundary(name):
    assert_matters(name, 256)


@pytest.mark.parametrize("name", ["c4_open", "c4_index_open", "c128_open"])
def test_open_blocks_matter_between_boundaries(name):
    assert_matters(name, 254)


def assert_matters(name, at):
    """Spoilt after ``at`` tokens, a buffer changes what is decoded from there on. Index keys only
    choose: with one entry of them wrong most prompts choose alike, so there are up to four."""
    for number in range(4):
        prompt, theirs = prompt_of(0, number, LENGTH), reference(0, number, LENGTH)
        host = V4Host(adopted())
        row, _ = host.feed(prompt[:at])
        spoil(host, name)
        mine = torch.cat([host.run((row, prompt[i : i + 1])) for i in range(at, LENGTH)])
        if float((mine - theirs[at:]).abs().max() / theirs.abs().max()) > 1000 * TOLERANCE:
            return
    pytest.fail(f"nothing depends on {name}")


def spoil(host, name):
    """Other numbers, of the same size, in every row that was written."""
    for group in host.spec.groups:
        for buffer in group.buffers:
            if buffer.name == name:
                for layer in buffer.layers:
                    rows = host.pools.layer(group.id, name, layer)
                    rows.copy_(rows.roll(1, -1))


def test_only_sampled_requests_have_logits():
    host, prompt = V4Host(adopted()), prompt_of(0, 0, LENGTH)
    a, b = host.open(), host.open()
    mine = host.run((a, prompt[:9]), (b, prompt[:130]), sampled=[False, True])
    assert_near(mine, reference(0, 0, LENGTH)[129:130])
    nothing = host.run((a, prompt[9:20]), (b, prompt[130:140]), sampled=[False, False])
    assert nothing.shape == (0, mine.shape[1])


class Gate:
    def __init__(self):
        self.waited = []

    def wait(self, layer):
        self.waited.append(layer)


def test_every_layer_waits_for_its_pages_once_and_in_order():
    host, gate = V4Host(adopted()), Gate()
    host.run((host.open(), prompt_of(0, 0, 7)), gate=gate)
    assert gate.waited == [LayerId(0), LayerId(1), LayerId(2)]


def test_a_directory_runs_like_the_module(tmp_path):
    hugging_face().save_pretrained(tmp_path)
    host = V4Host(load_model(tmp_path))
    _, mine = host.feed(prompt_of(0, 0, LENGTH))
    assert_near(mine, reference(0, 0, LENGTH)[-1])


def test_bfloat16_from_a_directory_rounds_where_hugging_face_does(tmp_path):
    """Few entries, so that rounding cannot change which are selected."""
    hugging_face().save_pretrained(tmp_path)
    prompt = prompt_of(0, 0, 34)
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        theirs = module(input_ids=torch.from_numpy(prompt).long()[None]).logits[0].float()
    host = V4Host(load_model(tmp_path, "bfloat16"))
    row, _ = host.feed(prompt[:20])
    mine = torch.cat([host.run((row, prompt[i : i + 1])) for i in range(20, 34)])
    assert mine.dtype == torch.float32
    assert (mine - theirs[20:]).abs().max() < 0.03 * theirs.abs().max()


def test_adapters_are_not_left_out_in_silence():
    model = replace(adopted(), adapters=SimpleNamespace(digests={"a": b""}))
    with pytest.raises(AssertionError, match="adapters were not refused"):
        V4Host(model)


def test_weights_are_shared_with_the_module():
    model = adopted()
    ours = V4Host(model).runner.model.state_dict()
    theirs = model.module.state_dict()
    assert {name: t.data_ptr() for name, t in ours.items()} == {
        name: t.data_ptr() for name, t in theirs.items()
    }


@pytest.mark.parametrize("page_tokens", [16, 64, 192])
def test_a_page_is_a_whole_number_of_blocks(page_tokens):
    with pytest.raises(ConfigError, match="allowed are multiples of 128"):
        V4Host(adopted(), page_tokens)


def test_an_open_block_that_moved_is_caught():
    host, prompt = V4Host(adopted()), prompt_of(0, 0, 20)
    row, _ = host.feed(prompt[:7])
    live = host.state_groups[0].id
    host.tables.slots.source(live)[row] += 1
    with pytest.raises(AssertionError, match="an open block has moved"):
        host.run((row, prompt[7:8]))


def test_decoding_rows_of_one_length_are_scored_together(monkeypatch):
    host = V4Host(adopted())
    rows = [host.open() for _ in range(8)]
    host.run(*[(row, prompt_of(0, i, 140)) for i, row in enumerate(rows)])
    seen, forward = [], V4Model.forward

    def watched(model, pages, step):
        seen.append(step)
        return forward(model, pages, step)

    monkeypatch.setattr(V4Model, "forward", watched)
    host.run(*[(row, prompt_of(0, i, 1)) for i, row in enumerate(rows)])
    (step,) = seen
    assert [queries.local.rows.shape[0] for queries in step.queries] == [8]

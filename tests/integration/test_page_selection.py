"""A model without an indexer whose queries see pages that bounds select: with pages on the host it
says what it says with all of them on the device, and, seeing as many as there are, what the model
says by itself. Pages of both tiers that nobody owns are NaN."""

from contextlib import closing
from functools import cache, partial

import pytest

from stratakv.core.config import ServerConfig
from stratakv.serve.wiring import build_service
from tests.fixtures.models import FAMILIES, random_prompt, tiny_model
from tests.hit_cases import engine_model
from tests.offloading import (
    ANSWER,
    V32,
    CountedRows,
    OffloadCase,
    answers,
    rows_of,
    spilled,
)
from tests.offloading_cases import (
    prefix_from_a_store,
    prefix_from_the_host,
    retracted_again_and_again,
)
from tests.scraped import scraped
from tests.serving import train_tokenizer

PAGE, SEEN, PLENTY = V32["page_tokens"], 4, 200
BUFFERS = (32, 40, 72)
PROMPTS = [random_prompt(seed, 90 + 13 * seed % 37) for seed in range(20)]


class PageCase(OffloadCase):
    """``seen``: pages that a query sees."""

    def __init__(self, family, seen=SEEN):
        groups = 1 if family in {"llama", "qwen3"} else 2
        device, host = (PLENTY,) * (groups + 1), (2 * PLENTY,) * (groups + 1)
        super().__init__(partial(engine_model, family), V32, device, host)
        self.seen = seen

    def config(self, buffer=None, **settings):
        selects = {} if buffer is None else {"approximate_pages": self.seen}
        return super().config(buffer, **selects | settings)

    @cache  # noqa: B019 - a case lives as long as the tests
    def right(self, *prompts, answer=ANSWER):
        """With all pages on the device, each on a cold cache."""
        found = []
        for prompt in prompts:
            with self.engine(PAGE * self.seen, selected=PLENTY) as parts:
                found += answers([prompt], parts, answer=answer)
                assert not spilled(parts)
        return found


CASES = {family: PageCase(family) for family in FAMILIES}
LLAMA = CASES["llama"]


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_with_all_on_the_device(family, buffer):
    some = rows_of(PROMPTS[:4])
    with CASES[family].engine(buffer) as parts:
        assert answers(some, parts) == CASES[family].right(*some)
        assert answers(some, parts, first=100) == CASES[family].right(*some), "from cached pages"
        assert CountedRows.pages_read
        if buffer < BUFFERS[-1]:
            assert CountedRows.rows


@pytest.mark.parametrize("family", FAMILIES)
def test_who_sees_all_pages_says_what_the_model_says(family):
    some = rows_of(PROMPTS[:3])
    case = PageCase(family, seen=20)
    with case.engine(160, selected=case.least(160) + 2, max_model_len=150) as parts:
        found = answers(some, parts)
    assert found == OffloadCase.right.__wrapped__(case, *some)
    assert found != CASES[family].right(*some), "fewer make no difference here"


@pytest.mark.parametrize("chunk", [8, 40, 64])
def test_what_is_selected_does_not_depend_on_how_a_prompt_is_cut(chunk):
    some = rows_of(PROMPTS[:4])
    with LLAMA.engine(32, selected=PLENTY, chunk_tokens=chunk, step_tokens=80) as parts:
        assert answers(some, parts) == LLAMA.right(*some)


def test_what_an_answer_has_left_is_what_a_prompt_would_have():
    """Each turn goes on from pages that decoding has written."""
    chats = [list(prompt[:60]) for prompt in PROMPTS[:8]]
    with LLAMA.engine(32, selected=LLAMA.least(32) + 15) as parts:
        for turn in range(3):
            asked = rows_of(chats)
            found = answers(asked, parts, first=100 * turn, answer=12)
            assert CountedRows.rows
            assert found == LLAMA.right(*asked, answer=12)
            chats = [
                [*chat, *answer, *random_prompt(50 + turn, 9)]
                for chat, answer in zip(chats, found, strict=True)
            ]


@pytest.mark.parametrize("selected", [None, 60])
def test_a_prefix_comes_from_the_host_and_from_a_store_spilled_or_not(selected):
    prefix_from_the_host(LLAMA, 32, PROMPTS[0], selected)
    prefix_from_a_store(LLAMA, 32, PROMPTS[0], selected)


@pytest.mark.parametrize("after", [2, 5, 9])
def test_a_retracted_request_answers_as_without_a_retraction(after):
    retracted_again_and_again(LLAMA, 32, rows_of(PROMPTS[:3]), after)


def test_recall_is_the_weight_that_was_seen():
    found = {}
    for seen in (4, 8, 20):
        case = PageCase("llama", seen)
        with case.engine(PAGE * seen, selected=PLENTY, max_model_len=150) as parts:
            answers(PROMPTS[:4], parts, answer=2)
            found[seen] = parts.runner.recall
    assert found[4].queries > found[8].queries > found[20].queries == 0
    assert 0.2 < found[4].mean < found[8].mean < 1
    assert found[20].mean == 1


def test_a_server_logs_what_fits_and_answers_and_reports_its_recall(tmp_path, caplog):
    caplog.set_level("INFO")
    path = train_tokenizer(tmp_path)
    tiny_model("llama").save_pretrained(path)
    config = LLAMA.config(
        32, device_memory="192KiB", host_memory="4MiB", chat_tokens=120, dtype="float32"
    )
    service, parts = build_service(path, config, ServerConfig())
    with closing(parts):
        assert answers(PROMPTS[:3], parts) == LLAMA.right(*rows_of(PROMPTS[:3]))
        found = scraped(service.metrics.render(parts.engine.stats()).decode())
    assert "120 tokens each: 1 requests with all on the device" in caplog.text
    assert "with offload, which pays above" in caplog.text
    queries, recall = (
        found[(f"stratakv_page_selection_{name}_total",)] for name in ("queries", "recall")
    )
    assert 0.2 * queries < recall < queries

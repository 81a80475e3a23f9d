"""A server that computes prompts and one that decodes with its selected rows on the host, as
processes over NIXL's TCP, one rank each or two: clients are told what one server without offload
says."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from stratakv.testing.patience import PATIENCE_S
from tests.fixtures.deepseek_v32 import random_tokens, v32_model
from tests.fixtures.servers import free_port
from tests.fixtures.transports import nixl_is_here
from tests.rank_processes import COMPLETIONS, body, launched
from tests.serving import train_tokenizer

VOCABULARY, ANSWER, COUNT = 400, 16, 3
FLAGS = (
    "--port", "0", "--page-tokens", "8", "--dtype", "float32", "--max-running", "6",
    "--max-model-len", "352", "--chunk-tokens", "24", "--step-tokens", "64", "--threads", "1",
    "--chat-tokens", "336",
)  # fmt: skip
PLENTY = ("--device-memory", "4MiB", "--host-memory", "4MiB")
SHORT = ("--device-memory", "340KiB", "--host-memory", "2MiB", "--device-buffer-size", "24")
"""Of selected rows room for 200 tokens: no prompt fits there, but buffers of all three."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = train_tokenizer(tmp_path_factory.mktemp("model"))
    v32_model("small", vocabulary=VOCABULARY).save_pretrained(path)
    return path


def asked(server, prompt, **more):
    made = body(prompt, ANSWER, return_token_ids=True, **more)
    answer = httpx.post(server.url + COMPLETIONS, json=made, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def of_both(prefill, decode, port, prompt, room):
    """As a router asks them."""
    more = {
        "cache_salt": "",
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": port,
        "bootstrap_room": room,
    }
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda one: asked(one, prompt, **more), (prefill, decode))
        return list(found)[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pair_whose_decode_side_reads_its_rows_on_the_host_says_what_one_server_says(
    model, tmp_path, ranks
):
    nixl_is_here()
    port = free_port()
    several = ["--tp", ranks, "--tp-timeout", 60] if ranks > 1 else []
    prompts = [random_tokens(seed, 240 + 37 * seed) for seed in range(COUNT)]
    lines = {
        "prefill": [*PLENTY, "--role", "prefill", "--bootstrap-port", port, "--sparse-offload"],
        "decode": [*SHORT, "--role", "decode", "--sparse-offload"],
        "alone": PLENTY,
    }
    with ExitStack() as undo:
        started = {}
        for name, more in lines.items():
            (tmp_path / name).mkdir()
            of = [] if name == "alone" else several
            line = ["serve", model, *FLAGS, *of, *more]
            count = 1 if name == "alone" else ranks
            started[name] = undo.enter_context(launched([line] * count, tmp_path / name))
        prefill, decode, alone = (started[name].listen() for name in lines)
        with ThreadPoolExecutor(COUNT) as threads:
            rooms = range(1, COUNT + 1)
            found = list(
                threads.map(lambda *of: of_both(prefill, decode, port, *of), prompts, rooms)
            )
        assert "336 tokens each: 0 requests with all on the device" in decode.logged(0)
        assert found == [asked(alone, prompt) for prompt in prompts]

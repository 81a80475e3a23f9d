"""Released clients against a real ``stratakv serve``, each from an environment of its own that
``make test-clients`` sets up. What they get back is what Hugging Face says of the same model.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stratakv.testing.patience import PATIENCE_S
from tests.clients.scripted_model import ANSWER, GREETING, scripted_model
from tests.fixtures.models import tiny_model
from tests.rank_processes import FLAGS, started
from tests.serving import TEXTS, train_tokenizer

pytestmark = pytest.mark.clients
HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / ".venv-clients" / "bin"
PARIS = {"city": "Paris"}
ADMIN, LONGEST_S = "an-operator", 600


def ran(folder, name, *arguments, limit_s=PATIENCE_S, offline="1"):
    """The standard output of a program of that environment. ``offline`` "": of one that takes the
    name of a folder for a hub's while it is told to be offline."""
    quiet = {
        "HF_HUB_OFFLINE": offline,
        "HF_DATASETS_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    quiet |= {
        "HF_HOME": str(folder / "hf"),
        "LANGSMITH_TRACING": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }
    found = subprocess.run(
        [ENVIRONMENT / name, *map(str, arguments)],
        capture_output=True, text=True, timeout=limit_s, cwd=folder,
        env=os.environ | quiet, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-6000:]
    return found.stdout


def script(folder, name, *arguments):
    return json.loads(ran(folder, "python", HERE / name, *arguments).splitlines()[-1])


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripted")
    model = scripted_model(folder / "model")
    with started(["serve", model, *FLAGS], folder / "log") as server:
        yield server.listen().url


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = train_tokenizer(tmp_path_factory.mktemp("tiny") / "model")
    tiny_model("gemma3").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tiny(directory):
    with started(["serve", directory, *FLAGS], directory.parent / "log") as server:
        yield server.listen().url


def test_the_openai_clients_helpers(scripted, tmp_path):
    found = script(tmp_path, "with_openai.py", scripted, "model")
    assert found["call"] == ["get_weather", "Paris"]
    assert (found["finish"], found["streamed"], found["told"]) == ("tool_calls", "Paris", ANSWER)
    assert found["mood"] == found["same"]
    assert found["mood"] in ("calm", "wild")
    assert (found["models"], found["page"]) == (["model"], ["a", "b"])


def test_langchain(scripted, tmp_path):
    found = script(tmp_path, "with_langchain.py", scripted, "model")
    assert found["call"] == ["get_weather", PARIS]
    assert (found["streamed"], found["told"]) == (PARIS, ANSWER)
    assert (found["plain"], found["none"]) == (GREETING, GREETING)
    assert {*found["moods"]} == {"json_schema", "function_calling"}
    assert {*found["moods"].values()} <= {"calm", "wild"}
    assert found["tokens"] > 10


def test_litellm(scripted, tmp_path):
    found = script(tmp_path, "with_litellm.py", scripted, "model")
    assert found["call"] == ["get_weather", PARIS]
    assert (found["finish"], found["streamed"]) == ("tool_calls", PARIS)
    assert (found["told"], found["text"]) == (ANSWER, "length")
    assert found["mood"] in ("calm", "wild")


def test_lm_eval_has_hugging_faces_log_likelihoods(tiny, directory, tmp_path):
    """Documents that begin alike, so that the cache has most of each."""
    choices = {"choices": [" fox", " dog", "東"], "answer": 1}
    rows = [{"context": (TEXTS[0] * 2 + TEXTS[at]).strip()} | choices for at in range(3)]
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    found = script(tmp_path, "with_lm_eval.py", tiny, "model", directory, documents, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    asked = [pair for sample in found["asked"] for pair in sample]
    got = [pair for sample in found["got"] for pair in sample]
    assert len(asked) == len(got) == 9
    for (context, choice), (value, greedy) in zip(asked, got, strict=True):
        before = len(tokenizer(context, add_special_tokens=False)["input_ids"])
        ids = tokenizer(context + choice, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0, before - 1 : -1].log_softmax(-1)
        wanted = scores.gather(1, torch.tensor(ids[before:])[:, None])
        assert value == pytest.approx(float(wanted.sum()), abs=1e-3)
        assert greedy == (scores.argmax(-1).tolist() == ids[before:])


def test_aiperf(tiny, directory, tmp_path):
    ran(
        tmp_path, "aiperf", "profile", "--model", "model", "--url", tiny, "--endpoint-type", "chat",
        "--streaming", "--tokenizer", directory, "--request-count", 6, "--concurrency", 2,
        "--isl", 40, "--osl", 8, "--ui", "none", "--artifact-dir", tmp_path / "aiperf",
        offline="",
    )  # fmt: skip
    (report,) = (tmp_path / "aiperf").rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text("utf-8"))
    assert found["request_count"]["avg"] == 6
    assert not found.get("error_summary")


def test_guidellm(tiny, directory, tmp_path):
    report = tmp_path / "report.json"
    ran(
        tmp_path, "guidellm", "run", "--disable-console",
        "--backend", f"kind=openai_http,target={tiny},model=model",
        "--tokenizer", f"kind=hf_auto,model={directory}",
        "--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=8",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
        "--output", f"kind=json,path={report}",
    )  # fmt: skip
    (found,) = json.loads(report.read_text("utf-8"))["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0)


@pytest.fixture
def small(directory, tmp_path):
    """The longest answer is short, whatever is asked for."""
    limits = ("--max-model-len", 48, "--max-waiting", 16)
    words = ["serve", directory, *FLAGS, *map(str, limits), "--admin-key", ADMIN]
    with started(words, tmp_path / "log", lives_s=LONGEST_S + 3 * PATIENCE_S) as server:
        yield server.listen().url


def schemathesis(folder, url, seconds):
    """Requests that are made from ``/openapi.json``, valid and not. That each valid one is answered
    is not asked for: a schema cannot say that one field needs another."""
    ran(
        folder, "schemathesis", "run", f"{url}/openapi.json", "--no-color", "--phases", "fuzzing",
        "--exclude-checks", "positive_data_acceptance", "--exclude-path", "/flush_cache",
        "--header", f"Authorization: Bearer {ADMIN}",
        "--request-timeout", PATIENCE_S, "--max-time", seconds, limit_s=seconds + PATIENCE_S,
    )  # fmt: skip


def test_schemathesis(small, tmp_path):
    schemathesis(tmp_path, small, 30)


@pytest.mark.long
def test_schemathesis_for_ten_minutes(small, tmp_path):
    schemathesis(tmp_path, small, LONGEST_S)

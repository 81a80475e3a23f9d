"""lm-eval's log-likelihoods from a server: base URL, model, its directory, a file of documents
(``{"context", "choices", "answer"}`` a line), and a folder of its own. Prints, for each, what was
asked and what it made of the answer.
"""

import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

url, model, directory, documents, folder = sys.argv[1:]
task = {
    "task": "tiny_choice",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": documents}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{context}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
Path(folder, "tiny_choice.yaml").write_text(json.dumps(task), "utf-8")
found = lm_eval.simple_evaluate(
    model="local-completions",
    model_args={
        "model": model,
        "base_url": f"{url}/v1/completions",
        "tokenizer": directory,
        "tokenizer_backend": "huggingface",
        "max_length": 400,
        "num_concurrent": 4,
    },
    tasks=["tiny_choice"],
    task_manager=TaskManager(include_path=folder, include_defaults=False),
    log_samples=True,
    bootstrap_iters=0,
)
samples = found["samples"]["tiny_choice"]
print(
    json.dumps({
        "acc": found["results"]["tiny_choice"]["acc,none"],
        "asked": [list(one["arguments"]) for one in samples],
        "got": [[[float(x[0]), bool(x[1])] for x in one["filtered_resps"]] for one in samples],
    })
)  # fmt: skip

"""Lives of an SGLang engine in one process: prompts in, tokens and what was cached out.

Owns nothing that lasts. Runs in SGLang's environment, as ``sglang_life.py CASE.json ANSWERS.json``,
with ``sglang_cpu`` on the path. A case has ``engine`` (arguments of ``Engine``), ``prompts`` (token
ids), ``tokens``, and ``stored``: how many pages a store must have at the end, or null.
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1")

import sglang

from stratakv.storage.file.fsck import fsck
from stratakv.testing.patience import wait_until


def live(case):
    engine = sglang.Engine(**case["engine"])
    sampling = {"temperature": 0, "max_new_tokens": case["tokens"], "ignore_eos": True}
    answers = []
    for prompt in case["prompts"]:
        one = engine.generate(input_ids=prompt, sampling_params=sampling)
        answers.append(
            {"cached": one["meta_info"]["cached_tokens"], "tokens": list(one["output_ids"])}
        )
    if (stored := case["stored"]) is not None:  # SGLang writes beside, and ends without waiting
        directory, pages = Path(stored["directory"]), stored["pages"]
        wait_until(lambda: fsck(directory, repair=False).pages >= pages, "every page in the store")
    engine.shutdown()
    return {"answers": answers}


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([live(case) for case in cases]))

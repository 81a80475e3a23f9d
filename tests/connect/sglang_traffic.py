"""Random traffic through SGLang's own scheduler, radix cache, cache controller and pools, over our
back end, with a model that computes nothing (``sglang_models``).

Owns the traffic. Runs in SGLang's environment on a CPU, as ``sglang_traffic.py CASE ANSWERS``, with
``sglang_cpu`` on the path. ``capability`` of a case: the one that a GPU would have, or null;
``longest``: tokens of what prompts share; ``stores``: URLs, for lives in turns, all of one store.
Between lives its pages may be spoilt. A life attaches it to an empty cache, as a restart does.
"""

import json
import logging
import os
import random
import sys
import time
from array import array
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

os.environ.update(
    HF_HUB_OFFLINE="1",
    SGLANG_EXTERNAL_MODEL_PACKAGE="sglang_models",
    SGLANG_TEST_RETRACT="1",
    SGLANG_TEST_RETRACT_INTERVAL="40",
)

import sglang
import torch
from sglang.srt.managers.io_struct import (
    AbortReq,
    AttachHiCacheStorageReqInput,
    DetachHiCacheStorageReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang_models.checked import COUNTS, PROMPTS

VOCABULARY = 512
LEAST_ABORTED = 2
"""In a life."""
POLICIES = ("wait_complete", "timeout", "best_effort")


class PageTotals(logging.Handler):
    """What the back end says of its pages when it is closed."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.total = Counter()

    def emit(self, record):
        if record.msg.startswith("pages of"):
            pool, counts = record.args
            self.total.update({f"{pool} {event}": pages for event, pages in counts.items()})


class Engine:
    """SGLang's scheduler, which is given requests by hand."""

    def __init__(self, case):
        arguments = ServerArgs(**case["engine"])
        arguments.resolve_once()
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        self.scheduler = Scheduler(arguments, PortArgs.init_new(arguments))
        self.counts = Counter()
        self.longest = case["longest"]

    def ask(self, rng):
        """A prompt that shares a beginning with others, of this life and of others."""
        document = random.Random(rng.randrange(8))
        words = [document.randrange(VOCABULARY) for _ in range(self.longest)]
        shared = words[: rng.randrange(1, self.longest - 40)]
        prompt = shared + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 40))]
        self.counts["requests"] += 1
        name = f"r{self.counts['requests']}"
        PROMPTS[name] = prompt
        sampling = SamplingParams(
            temperature=0, max_new_tokens=rng.randrange(1, 48), ignore_eos=True
        )
        sampling.normalize(None)
        self.scheduler.process_input_requests(
            [
                TokenizedGenerateReqInput(
                    rid=name, input_text=None, input_ids=array("q", prompt), input_embeds=None,
                    mm_inputs=None, token_type_ids=None, sampling_params=sampling,
                    return_logprob=False, logprob_start_len=-1, top_logprobs_num=0,
                    token_ids_logprob=None, stream=False,
                )
            ]
        )  # fmt: skip

    def step(self):
        """As SGLang's own loop does, and whether anything ran."""
        one = self.scheduler
        plan = one.get_next_batch_to_run(running_batch=one.running_batch, last_batch=one.last_batch)
        one.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch:
            one.process_batch_result(batch, one.run_batch(batch))
            self.counts["steps"] += 1
        else:
            one.on_idle()
            time.sleep(0)  # the threads of the cache controller work
        one.last_batch = batch

    @property
    def waiting(self):
        return [request.rid for request in self.scheduler.waiting_queue]

    @property
    def running(self):
        return [request.rid for request in self.scheduler.running_batch.reqs]

    def live(self, rng, steps, attach):
        attached = self.scheduler.attach_hicache_storage_wrapped(attach)
        assert attached.success, attached.message
        begun, aborted = self.counts["steps"], self.counts["aborted"]
        # How many turns a step takes is the machine's: a life goes on until somebody was aborted.
        while (
            self.counts["steps"] < begun + steps or self.counts["aborted"] < aborted + LEAST_ABORTED
        ):
            under_way = self.waiting + self.running
            if len(under_way) < 8 and rng.random() < 0.5:
                self.ask(rng)
            if under_way and rng.random() < 0.03:
                self.counts["aborted"] += 1
                self.scheduler.process_input_requests([AbortReq(rid=rng.choice(under_way))])
            self.step()
        while not self.scheduler.is_fully_idle():
            self.step()
        detached = self.scheduler.detach_hicache_storage_wrapped(DetachHiCacheStorageReqInput())
        assert detached.success, detached.message
        assert self.scheduler.flush_cache()
        PROMPTS.clear()


def spoil(storage, rng):
    """Some bytes of the store are other ones."""
    for path in Path(urlsplit(storage).path).rglob("*.seg"):
        data = bytearray(path.read_bytes())
        for at in range(rng.randrange(1 << 12), len(data), 1 << 16):
            data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)


def main(case):
    torch.set_num_threads(1)
    if (capability := case["capability"]) is not None:
        # Of a GPU: SGLang asks for it before it makes pools of index keys, and uses it in kernels.
        torch.cuda.get_device_capability = lambda *_: tuple(capability)
    totals = PageTotals()
    log = logging.getLogger("stratakv.connect.sglang")
    log.addHandler(totals)
    log.setLevel(logging.INFO)
    engine = Engine(case)
    for life in range(case["lives"]):
        storage = case["stores"][life % len(case["stores"])]
        attach = AttachHiCacheStorageReqInput(
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config_json=json.dumps(
                case["extra"] | {"storage": storage}
            ),
            hicache_storage_prefetch_policy=POLICIES[life % len(POLICIES)],
            hicache_write_policy="write_through",
        )
        engine.live(random.Random(case["seed"] + life), case["steps"], attach)
        if life % 2:
            spoil(storage, random.Random(life))
    return {"release": sglang.__version__, **engine.counts, **COUNTS, **totals.total}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))

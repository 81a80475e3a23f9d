"""Random traffic through vLLM's own scheduler, cache manager and connector, over our tier: a runner
that computes nothing writes for each token what only its whole prefix decides, and before each step
looks at every byte that attention would read.

Owns the traffic and those bytes. Runs in vLLM's environment, as ``vllm_traffic.py CASE ANSWERS``,
on a CPU and with a CUDA wheel. ``stores``: settings of the tier, for lives in turns, all of one
store; between lives its pages may be spoilt.
"""

import inspect
import json
import os
import random
import sys
from collections import Counter, deque
from pathlib import Path
from urllib.parse import urlsplit

os.environ.update(
    VLLM_TARGET_DEVICE="cpu",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import numpy as np
import torch
import vllm
from cpu_tiering import CopyingWorker, CpuTieringSpec
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import TransferResult
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, WINDOW, BLOCKS, VOCABULARY = 16, 64, 48, 500
TOKEN_BYTES = 128
MOST_IDLE = 300_000
"""Steps in which nothing is scheduled, one after another: some minutes of them."""
STRANDED_IDLE = 100
"""After so many of them, whoever vLLM has stranded is let go on: its own doing, not the tier's."""
LONGEST = 400
LAYERS = {"full.0": None, "full.1": None, "window.0": WINDOW, "window.1": WINDOW}
MULTIPLIERS = np.random.default_rng(7).integers(1, 2**63, (len(LAYERS), 16), np.uint64) | 1


class LaggingWorker(CopyingWorker):
    """Copies some polls later, as a GPU's streams do; what is waited for, at once."""

    rng = random.Random(0)

    def __init__(self, *given):
        super().__init__(*given)
        self.queued = deque()

    def submit_store(self, job_id, src_spec, dst_spec):
        self.queued.append((job_id, super().submit_store, (src_spec, dst_spec)))
        return True

    def submit_load(self, job_id, src_spec, dst_spec, **hints):
        self.queued.append((job_id, super().submit_load, (src_spec, dst_spec)))
        return True

    def advance(self, count):
        for _ in range(min(count, len(self.queued))):
            job_id, copy, specs = self.queued.popleft()
            copy(job_id, *specs)

    def get_finished(self) -> list[TransferResult]:
        self.advance(self.rng.choice((0, 0, 1, 2, 8)))
        return super().get_finished()

    def wait(self, job_ids):
        while any(job in job_ids for job, _, _ in self.queued):
            self.advance(1)


class LaggingSpec(CpuTieringSpec):
    worker_class = LaggingWorker


def chained(tokens, digests=()):
    """Of each token, what all tokens up to it decide, uint64."""
    found = list(digests)
    at = found[-1] if found else 0x9E3779B97F4A7C15
    for token in tokens[len(found) :]:
        at = ((at ^ (token + 1)) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
        found.append(at)
    return found


class Row:
    """What a model runner keeps of a request."""

    def __init__(self, tokens, blocks):
        self.tokens = list(tokens)
        self.digests = chained(self.tokens)
        self.blocks = [list(group) for group in blocks]

    def append(self, token):
        self.tokens.append(token)
        self.digests = chained(self.tokens, self.digests)


class Runner:
    """In place of vLLM's model runner; layers' pages lie as the cache configuration says."""

    def __init__(self, config, kv_cache, rng):
        self.rng = rng
        self.kv_cache = kv_cache
        self.rows = {}
        self.counts = Counter()
        (first, *_) = kv_cache.kv_cache_tensors
        self.memory = torch.zeros(first.size, dtype=torch.int8)
        caches, self.pages = {}, {}
        for tensor in kv_cache.kv_cache_tensors:
            for at, layer in enumerate(tensor.layers):
                begin = tensor.offset + at * tensor.layer_stride
                size = (kv_cache.num_blocks, 1, BLOCK, TOKEN_BYTES // 4)
                stride = (tensor.block_stride // 4, BLOCK * TOKEN_BYTES // 4, TOKEN_BYTES // 4, 1)
                view = self.memory.view(torch.float32)
                caches[layer] = torch.as_strided(view, size, stride, begin // 4)
                words = self.memory.view(torch.int64)
                size = (kv_cache.num_blocks, BLOCK, TOKEN_BYTES // 8)
                stride = (tensor.block_stride // 8, TOKEN_BYTES // 8, 1)
                page = torch.as_strided(words, size, stride, begin // 8)
                self.pages[layer] = page.numpy().view(np.uint64)
        self.connector = KVConnectorFactory.create_connector(
            config=config, role=KVConnectorRole.WORKER, kv_cache_config=kv_cache
        )
        self.connector.register_kv_caches(caches)

    def step(self, scheduled):
        """One step, in the order of vLLM's model runner."""
        metadata = scheduled.kv_connector_metadata
        self.connector.handle_preemptions(metadata)
        self.update(scheduled)
        self.connector.bind_connector_metadata(metadata)
        sync = scheduled.has_sync_kv_loads
        if sync:
            self.connector.start_load_kv(None)
        answers = [self.forward(one, count) for one, count in self.batch(scheduled)]
        if not sync:
            self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        ended = self.connector.get_transfer_results(scheduled.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=ended.finished_sending,
            finished_recving=ended.finished_recving,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        names = [one for one, _ in self.batch(scheduled)]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=answers,
            kv_connector_output=output,
        )

    def batch(self, scheduled):
        return list(scheduled.num_scheduled_tokens.items())

    def update(self, scheduled):
        assert not scheduled.kv_cache_block_copies, "vLLM copies blocks: the runner must, too"
        for block in scheduled.new_block_ids_to_zero or ():
            for page in self.pages.values():
                page[block] = 0
        for name in scheduled.finished_req_ids:
            self.rows.pop(name, None)
        self.computed = {}
        for new in scheduled.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self.rows[new.req_id] = Row(tokens, new.block_ids)
            self.computed[new.req_id] = new.num_computed_tokens
            self.counts["cached_tokens"] += new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            row, more = self.rows[name], cached.new_block_ids[at]
            if name in cached.resumed_req_ids:
                row.blocks = [list(group) for group in more]
                self.counts["resumed"] += 1
            elif more is not None:
                for group, blocks in zip(row.blocks, more, strict=True):
                    group.extend(blocks)
            self.computed[name] = cached.num_computed_tokens[at]

    def forward(self, name, count):
        """Look at what attention reads, write what it would; a token where the end is reached."""
        row, begin = self.rows[name], self.computed[name]
        for group, blocks in zip(self.kv_cache.kv_cache_groups, row.blocks, strict=True):
            for layer in group.layer_names:
                window = LAYERS[layer]
                first = 0 if window is None else max(0, begin - window + 1)
                self.compare(name, layer, blocks, row, first, begin)
                self.write(layer, blocks, row, begin, begin + count)
        if begin + count < len(row.tokens):
            return []
        row.append(self.rng.randrange(VOCABULARY))
        return [row.tokens[-1]]

    def places(self, layer, blocks, row, first, end):
        at = np.arange(first, end)
        digests = np.array(row.digests[first:end], np.uint64)[:, None]
        expected = digests * MULTIPLIERS[list(LAYERS).index(layer)]
        return np.array(blocks)[at // BLOCK], at % BLOCK, expected

    def compare(self, name, layer, blocks, row, first, end):
        if first == end:
            return
        block, slot, expected = self.places(layer, blocks, row, first, end)
        found = self.pages[layer][block, slot]
        wrong = np.flatnonzero((found != expected).any(axis=1))
        assert not len(wrong), (
            f"{name}: attention of {layer} would read {len(wrong)} wrong tokens, the first "
            f"{first + wrong[0]} of {end}"
        )
        self.counts["checked_bytes"] += found.nbytes

    def write(self, layer, blocks, row, first, end):
        block, slot, expected = self.places(layer, blocks, row, first, end)
        self.pages[layer][block, slot] = expected


def planned(config, specs):
    """How vLLM lays out the pages of these layers; since 0.33 in two calls."""
    given = [config, [specs], [1 << 30]]
    if "global_kv_cache_groups" in inspect.signature(core.get_kv_cache_configs).parameters:
        given.append(core.get_global_kv_cache_groups(config, [specs]))
    (kv_cache,) = core.get_kv_cache_configs(*given)
    return kv_cache


class Engine:
    """vLLM's scheduler over a runner that computes nothing."""

    def __init__(self, case, store, seed):
        self.rng = random.Random(seed)
        tier = {"type": "StrataTier", "module_path": "stratakv.connect.vllm", **store}
        extra = {
            "spec_name": "LaggingSpec", "spec_module_path": "vllm_traffic",
            "cpu_bytes_to_use": case["host_bytes"], "secondary_tiers": [tier],
        }  # fmt: skip
        config = EngineArgs(
            model=case["model"], skip_tokenizer_init=True, dtype="float32", block_size=BLOCK,
            max_model_len=LONGEST + 64, max_num_seqs=6, max_num_batched_tokens=128,
            enable_prefix_caching=True, num_gpu_blocks_override=BLOCKS, async_scheduling=False,
            kv_transfer_config=KVTransferConfig(
                kv_connector="StrataConnector", kv_connector_module_path="stratakv.connect.vllm",
                kv_role="kv_both", kv_connector_extra_config=extra,
            ),
        ).create_engine_config()  # fmt: skip
        shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
        specs = {
            layer: FullAttentionSpec(**shape) if window is None
            else SlidingWindowSpec(**shape, sliding_window=window)
            for layer, window in LAYERS.items()
        }  # fmt: skip
        config.cache_config.kv_cache_layout = "LBHNC"
        kv_cache = planned(config, specs)
        kv_cache.kv_cache_layout = "LBHNC"
        config.cache_config.num_gpu_blocks = kv_cache.num_blocks
        block, hashed = core.resolve_kv_cache_block_sizes(kv_cache, config)
        self.scheduler = Scheduler(
            vllm_config=config, block_size=block, hash_block_size=hashed,
            kv_cache_config=core.generate_scheduler_kv_cache_config([kv_cache]),
            structured_output_manager=StructuredOutputManager(config), log_stats=False,
        )  # fmt: skip
        hashing = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        core.init_none_hash(hashing)
        self.hasher = core.get_request_block_hasher(hashed, hashing)
        self.runner = Runner(config, kv_cache, self.rng)
        self.counts = self.runner.counts
        self.idle = 0

    def ask(self):
        """A prompt that shares a beginning with others, of this life and of others."""
        document = random.Random(self.rng.randrange(8))
        words = [document.randrange(VOCABULARY) for _ in range(LONGEST)]
        shared = words[: self.rng.randrange(1, LONGEST - 40)]
        own = [self.rng.randrange(VOCABULARY) for _ in range(self.rng.randrange(1, 40))]
        self.counts["requests"] += 1
        sampling = SamplingParams(
            max_tokens=self.rng.randrange(1, 48), ignore_eos=True, temperature=0
        )
        self.scheduler.add_request(
            Request(
                request_id=f"r{self.counts['requests']}", prompt_token_ids=shared + own,
                sampling_params=sampling, pooling_params=None, block_hasher=self.hasher,
            )
        )  # fmt: skip

    def abort(self):
        name = self.rng.choice([*self.scheduler.requests])
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        self.counts["aborted"] += 1

    def step(self):
        scheduled = self.scheduler.schedule()
        output = self.runner.step(scheduled)
        self.scheduler.update_from_output(scheduled, output)
        self.counts["steps"] += 1
        self.idle = 0 if scheduled.num_scheduled_tokens else self.idle + 1
        if self.idle >= STRANDED_IDLE and self.stranded:
            self.give_up_first()
        assert self.idle < MOST_IDLE, f"nothing is scheduled any more: {self.state()}"

    @property
    def stranded(self):
        """Whether loads have ended that vLLM does not look at: its scheduler stops at the first who
        waits and does not fit, and those behind keep their blocks, so nothing ever becomes free
        (vllm-project/vllm, pull request 57841). With vLLM's own tiers, too."""
        (tier,) = self.scheduler.connector.connector_scheduler.manager.secondary_tiers
        return bool(
            self.scheduler.finished_recving_kv_req_ids
            and not self.scheduler.running
            and not tier.has_pending_work()
        )

    def give_up_first(self):
        """As a client that waits no longer."""
        first = next(
            name
            for name, request in self.scheduler.requests.items()
            if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS
        )
        self.scheduler.finish_requests([first], RequestStatus.FINISHED_ABORTED)
        self.counts["stranded"] += 1

    def state(self):
        """For whoever looks why nothing goes on."""
        one = self.scheduler
        connector = one.connector.connector_scheduler
        (tier,) = connector.manager.secondary_tiers
        blocks = [
            {name: len(held) for name, held in group.req_to_blocks.items()}
            for group in one.kv_cache_manager.coordinator.single_type_managers
        ]
        return {
            "requests": {
                name: (str(request.status), request.num_computed_tokens, request.num_tokens)
                for name, request in one.requests.items()
            },
            "free": one.kv_cache_manager.block_pool.get_num_free_blocks(),
            "blocks": blocks,
            "tier_busy": tier.has_pending_work(),
            "totals": dict(tier.totals),
            "connector": {name: repr(value)[:300] for name, value in vars(connector).items()},
            "manager": {name: repr(value)[:300] for name, value in vars(connector.manager).items()},
        }

    def live(self, steps):
        for _ in range(steps):
            if len(self.scheduler.requests) < 8 and self.rng.random() < 0.5:
                self.ask()
            if self.scheduler.requests and self.rng.random() < 0.03:
                self.abort()
            self.step()
        while self.scheduler.has_requests():
            self.step()
        (tier,) = self.scheduler.connector.connector_scheduler.manager.secondary_tiers
        self.runner.connector.shutdown()
        self.scheduler.shutdown()
        return Counter(self.counts) + Counter(tier.totals)


def spoil(storage, rng):
    """Some bytes of the store are other ones."""
    for path in Path(urlsplit(storage).path).rglob("*.seg"):
        data = bytearray(path.read_bytes())
        for at in range(rng.randrange(1 << 12), len(data), 1 << 16):
            data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)


def main(case):
    total = Counter()
    for life in range(case["lives"]):
        store = case["stores"][life % len(case["stores"])]
        total += Engine(case, store, case["seed"] + life).live(case["steps"])
        if life % 2:
            spoil(store["storage"], random.Random(life))
    return {"release": vllm.__version__, **total}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))

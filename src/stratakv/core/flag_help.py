"""What each flag of a server means, in the words of ``--help`` and of the table in docs/serve.md.

Owns words alone: a flag's name and default are ``config``'s.
"""

from typing import Final

from stratakv.core.choices import (
    BOOTSTRAP_PORT,
    DEVICES,
    DTYPES,
    EVICTIONS,
    PREFETCH_POLICIES,
    ROLES,
    TIERS,
    TOOL_CALL_PARSERS,
    TRANSPORTS,
    UNSALTED_ROOMS,
    WRITE_POLICIES,
)
from stratakv.core.logs import FORMATS, LEVELS

CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "dtype": (*DTYPES, "auto"),
    "device": DEVICES,
    "cache": TIERS,
    "eviction": EVICTIONS,
    "write_policy": WRITE_POLICIES,
    "prefetch_policy": PREFETCH_POLICIES,
    "role": ROLES,
    "log_level": LEVELS,
    "log_format": FORMATS,
    "tool_call_parser": TOOL_CALL_PARSERS,
    "transport": TRANSPORTS,
    "unsalted_rooms": UNSALTED_ROOMS,
}
"""Of settings that are one word of a list; ``config`` checks them."""
METAVAR: Final = {
    "device_memory": "SIZE|SHARE",
    "host_memory": "SIZE",
    "lora": "NAME=DIR",
    "storage": "URL",
    "storage_root": "DIR",
    "storage_key_file": "FILE",
    "prefetch_threshold": "TOKENS",
    "prefetch_share": "SHARE",
    **dict.fromkeys(("prefetch_timeout", "prefetch_timeout_per_1k", "tp_timeout"), "SECONDS"),
    "timeout_keep_alive": "SECONDS",
    "timeout_request": "SECONDS",
    **dict.fromkeys(("api_key", "admin_key"), "KEY"),
    "api_key_file": "FILE",
    **dict.fromkeys(("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"), "FILE"),
    "allowed_origins": "ORIGIN",
    "otlp_traces_endpoint": "URL",
    **dict.fromkeys(("kv_events", "kv_events_replay"), "ENDPOINT"),
    **dict.fromkeys(("advertise_host", "prefill_hosts"), "HOST"),
    **dict.fromkeys(("prefill", "decode"), "URL"),
    "transfer_timeout": "SECONDS",
}
RENAMED: Final = {"storage-cut": "--storage-shards"}
"""Old names of flags, which are refused, with the new ones."""
HELP: Final = {
    "page_tokens": "tokens of a page: the unit of identity, allocation and transfer; default: 64, "
    "or 128 where the model compresses that many to one row (DeepSeek-V4)",
    "dtype": "float32, bfloat16, float16, or auto: the checkpoint's own",
    "cache": "off: recompute everything; device: one tier; host: device and host",
    "device": "what computes, and holds the device tier: cpu, or cuda, a GPU of compute capability "
    "8.0 or more",
    "device_memory": "bytes for the device tier, as 512MiB, 2GiB or 1.5GB, or with --device cuda a "
    "share of what is free beside the model, as 0.85; default: 2GiB, or with --device cuda 0.85",
    "host_memory": "bytes for the host tier; not together with --host-ratio",
    "host_ratio": "host pages per device page; default: 2.0, or what fits 0.8 of the free memory",
    "max_running": "requests that run at once",
    "max_model_len": "tokens of prompt and answer together; default: what the model and the "
    "device memory allow",
    "step_tokens": "most tokens that one step computes",
    "chunk_tokens": "most prompt tokens of one request in a step",
    "chat_tokens": "typical length of a conversation; decides the split between cache groups",
    "reserve_tokens": "output tokens booked per request at admission; one that needs more when "
    "pages run short may be retracted to the host and comes back",
    "snapshot_tokens": "how often a decoding request keeps its state (Mamba and linear attention), "
    "a multiple of --page-tokens; default: 256, in whole pages",
    "load_back_threshold": "a host hit that saves fewer tokens is recomputed",
    "load_back_budget": "most tokens being loaded at once",
    "eviction": f"which cached pages leave first: {', '.join(EVICTIONS)}",
    "write_policy": f"when a page is copied to the host: {', '.join(WRITE_POLICIES)}",
    "write_hits": "uses after which write-through-selective copies a page; the first counts",
    "write_back_reserve": "share of the device's pages that write-back keeps free or copied",
    "lora": "a LoRA adapter in a PEFT directory, which requests name in place of the model; may be "
    "repeated",
    "storage": "a third tier that outlives the server: file:///DIR?quota=200GiB, redis://, s3://, "
    "mooncake://, memory://",
    "storage_root": "a directory below which PUT /cache/storage may attach file stores; may be "
    "repeated; default: none but the directory of --storage",
    "storage_key_file": "a secret of all servers of a store: pages are sealed with it, and what "
    "was written without it is never used; default: whoever can write to a store is trusted",
    "prefetch_policy": "how long a request waits for pages from storage: best-effort (not at all), "
    "wait-complete (until they are there), timeout (for a time)",
    "prefetch_threshold": "a fetch from storage that saves fewer tokens is not begun; default: "
    "256, or a page if that is more",
    "prefetch_share": "share of the host's pages that may be on their way from storage",
    "prefetch_timeout": "seconds that a request waits for storage under --prefetch-policy timeout",
    "prefetch_timeout_per_1k": "and for each 1,024 tokens of its fetch; 30 seconds at most in all, "
    "or --prefetch-timeout if that is more",
    "tp": "tensor-parallel ranks, started on this machine or by torchrun; memory sizes are of each",
    "tp_timeout": "seconds after which a rank that does not answer is lost, and all end",
    "storage_shards": "shards that stored pages are split into by key heads, a multiple of --tp: "
    "servers with as many share a store, others are refused it; default: none, or 8 with --tp",
    "sparse_offload": "let rows that an indexer selects (DeepSeek-V3.2, V4, GLM) stay on the host, "
    "so that more and longer requests run than the device holds; they stay on the device while "
    "there is room",
    "device_buffer_size": "of --sparse-offload: rows of each layer that a request whose pages have "
    "left the device has there, the model's top-k at least; default: twice that",
    "approximate_pages": "of --sparse-offload, APPROXIMATE: a model without an indexer (Llama and "
    "the like) sees so many pages of its context in each step, chosen by bounds of their keys, and "
    "its answers are not quite its own; default: such a model is refused",
    "cuda_graph_max_bs": "of --device cuda: decode steps of up to so many requests are replayed as "
    "CUDA graphs, larger ones run eagerly; default: --max-running, 256 at most",
    "disable_cuda_graph": "of --device cuda: run every step eagerly",
    "kv_cache_metrics": "measure how long cached pages stay, how long they are idle before they "
    "leave, and the gap between two uses; a few microseconds a request",
    "model": "a directory with config.json and safetensors; of serve also a name on the Hugging "
    "Face hub, from its local cache or downloaded",
    "host": "address to listen on",
    "port": "port to listen on; 0: any free one, printed",
    "served_model_name": "the name clients use; default: the directory's",
    "api_key": "what Authorization: Bearer must carry; default: anyone may ask. On a command line "
    "others see it (ps): rather STRATAKV_API_KEY, --config or --api-key-file",
    "api_key_file": "keys of several clients, any of which Authorization: Bearer may carry: lines "
    "of NAME KEY, in a file that others cannot read; the access log has the name",
    "admin_key": "what Authorization: Bearer must carry to flush the cache and to change its "
    "storage; default: the storage cannot be changed. Rather STRATAKV_ADMIN_KEY or --config",
    "max_waiting": "requests that may wait; more get a 503",
    "default_max_tokens": "most tokens of a chat answer whose request names no max_tokens",
    "limit_concurrency": "open connections; who comes when all are being answered gets a 503, but "
    "for probes, and idle ones make room; default: what ulimit -n leaves, 8192 at most",
    "timeout_keep_alive": "seconds that a connection may stay open without a request",
    "timeout_request": "seconds in which a request must have come; a body gets one more for each "
    "16 KiB",
    "ssl_certfile": "a PEM file with the server's certificate and those up to its authority: the "
    "server speaks HTTPS alone; read once, at start",
    "ssl_keyfile": "a PEM file with the certificate's key, without a password; default: in "
    "--ssl-certfile",
    "ssl_ca_certs": "a PEM file with authorities: clients need a certificate of one of them, "
    "probes and scrapers too",
    "allowed_origins": "an origin whose pages may ask from a browser (CORS), as "
    "https://app.example, or *; may be repeated; default: none but the server's own",
    "drain_s": "seconds that running requests get after SIGTERM",
    "kv_events": "publish what is cached over ZeroMQ in vLLM's form: tcp://*:5557 is bound here, "
    "an endpoint without a wildcard is connected to, where a subscriber has to be bound",
    "kv_events_replay": "where subscribers ask for batches that they have missed, as tcp://*:5558",
    "kv_events_topic": "the topic of what is published; some routers want kv@POD@MODEL",
    "otlp_traces_endpoint": "send a span of each request to this OpenTelemetry collector, over "
    "HTTP, as http://localhost:4318/v1/traces",
    "role": "unified: compute prompts and decode; prefill: compute prompts for servers that "
    "decode; decode: go on with what prefill servers have computed",
    "prefill": "a server with --role prefill, as http://HOST:PORT; may be repeated",
    "decode": "a server with --role decode, as http://HOST:PORT; may be repeated",
    "transport": f"what moves pages between servers: {', '.join(TRANSPORTS)}; default: "
    f"{TRANSPORTS[0]}",
    "bootstrap_port": "of --role prefill: port where servers that decode join it, on --host; 0: "
    f"any free one; default: {BOOTSTRAP_PORT}",
    "advertise_host": "this machine's address as peers reach it; default: --host",
    "transfer_timeout": "seconds after which a hand-off has failed that waits for its peer, for "
    "pages or for its transfer",
    "peer_tp": "--tp of the servers of the other role, where they have more ranks than this one; "
    "default: --tp",
    "log_level": "what is logged at least; debug: also what probes and scrapers ask",
    "tool_call_parser": "the form in which the model writes calls of tools, by vLLM's names; auto: "
    "the one that its chat template shows",
    "log_format": "text, or json: an object a line",
    "threads": "threads of the forward; default: torch's",
    "prefill_hosts": "of --role decode: a host at which prefill servers may be joined, whatever a "
    "client names; may be repeated; default: any, or with API keys those of this machine alone",
    "unsalted_rooms": "requests with bootstrap_room whose tenant's cache_salt a router may have "
    "dropped: refuse them, or let them share one cache",
}

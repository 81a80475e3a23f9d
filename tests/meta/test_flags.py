"""The command line, frozen: what somebody's script may have in it stays.

Owns the list. A flag that is to go keeps its name for a release, with a refusal that names what
stands for it now (``RENAMED``); a new one is added here.
"""

from stratakv.cli import argument_parser

PLAN = """--cache --chat-tokens --chunk-tokens --config --device --device-memory --dtype --help
    --host-memory --host-ratio --json --max-model-len --max-running --page-tokens --rows
    --snapshot-tokens --step-tokens --tp"""
SERVE = """--admin-key --advertise-host --allowed-origins --api-key --api-key-file
    --approximate-pages
    --bootstrap-port --cache --chat-tokens --chunk-tokens --config --cuda-graph-max-bs
    --default-max-tokens --device --device-buffer-size --device-memory --disable-cuda-graph
    --drain-s --dtype --eviction --help --host
    --host-memory --host-ratio --kv-cache-metrics --kv-events --kv-events-replay --kv-events-topic
    --limit-concurrency --load-back-budget --load-back-threshold --log-format --log-level
    --lora --max-model-len --max-running --max-waiting --no-disable-cuda-graph
    --no-kv-cache-metrics
    --no-sparse-offload --otlp-traces-endpoint --page-tokens --peer-tp --port --prefetch-policy
    --prefill-hosts --prefetch-share --prefetch-threshold --prefetch-timeout
    --prefetch-timeout-per-1k --reserve-tokens --role --served-model-name --snapshot-tokens
    --sparse-offload --ssl-ca-certs --ssl-certfile --ssl-keyfile --step-tokens --storage
    --storage-key-file --storage-root --storage-shards --threads --timeout-keep-alive
    --timeout-request --tool-call-parser --tp --tp-timeout --transfer-timeout --transport
    --unsalted-rooms --write-back-reserve --write-hits --write-policy"""
FROZEN = {
    "": "--help --version",
    "serve": SERVE,
    "route": "--config --decode --help --host --port --prefill",
    "plan bytes": PLAN,
    "config show": f"{SERVE} --json",
    "config schema": "--help",
    "verify": "--dtype --help --json --page-tokens --prompt-tokens --storage --threads",
    "fsck": "--help --json --repair",
    "doctor": "--help --engine-flags --host-memory --json --storage --storage-key-file --why-miss",
    "why-miss": "--help --json --prompts --url",
    "completion": "--help",
}
"""By verb; what a bench takes may change."""


def test_no_flag_is_lost_and_none_is_added_unseen():
    for verb, flags in FROZEN.items():
        parser = argument_parser()
        for word in verb.split():
            parser = parser.parts[word]
        assert {flag for flag in parser.flags() if flag != "-h"} == set(flags.split()), verb

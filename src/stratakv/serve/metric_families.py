"""Every metric of a server: its name, type, labels, and what it says in a user's words.

Owns these alone; ``docs/metrics.md`` is made of them (``scripts/metrics_page.py``). Each has the
label ``model_name`` too. Names carry units, counters end in ``_total``; no label ever holds
anything a client chose (request ids, salts, unknown paths).
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

MetricKind: TypeAlias = Literal["counter", "gauge", "histogram"]
MODEL: Final = "model_name"
PREFIX: Final = "stratakv_"


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """``name``: without prefix, and without a counter's ``_total``. ``text``: Markdown, a clause.
    ``see``: a link for the page."""

    name: str
    kind: MetricKind
    text: str
    labels: tuple[str, ...] = ()
    see: str = ""

    @property
    def help(self) -> str:
        """As Prometheus shows it."""
        plain = self.text.replace("`", "")
        return plain[0].upper() + plain[1:]

    @property
    def full_name(self) -> str:
        return f"{PREFIX}{self.name}{'_total' * (self.kind == 'counter')}"


F: TypeAlias = MetricFamily
OF_REQUESTS: Final = (
    F("http_responses", "counter", "responses, by route", ("path", "status")),
    F("requests", "counter", "choices that were answered to their end: `stop`, `length`, `error`",
      ("finish_reason",)),
    F("requests_aborted", "counter", "choices whose client or server left"),
    F("prompt_tokens", "counter", "tokens of prompts whose first token came"),
    F("generated_tokens", "counter", "tokens of answers"),
    F("cached_prompt_tokens", "counter",
      "prompt tokens that were not computed, by where they lay: `device`, `host`, `storage`",
      ("tier",)),
    F("cached_group_tokens", "counter", "prompt tokens whose pages a cache group had",
      ("group", "tier")),
    F("kv_event_batches_lost", "counter", "batches of KV events that no subscriber can get",
      see="[KV events](kv-events.md)"),
    F("time_to_first_token_seconds", "histogram", "seconds from a request to its first token"),
    F("inter_token_latency_seconds", "histogram", "seconds between two tokens of a request"),
    F("e2e_request_latency_seconds", "histogram",
      "seconds from a request to the end of its answer"),
)  # fmt: skip
"""What the server sees of its requests."""
OF_THE_ENGINE: Final = (
    F("requests_failed", "counter",
      "requests that ended with an error of their own: `internal`, `not_finite`, `no_token`, "
      "`copy`, `transfer`", ("cause",)),
    F("requests_waiting", "gauge", "requests that wait, retracted ones among them"),
    F("requests_retracted", "gauge", "retracted requests that wait to come back"),
    F("requests_running", "gauge", "requests that run"),
    F("requests_by_phase", "gauge",
      "requests that are `waiting`, `prefilling`, `transferring` (between two servers), "
      "`decoding` or `retracted`", ("phase",)),
    F("engine_steps", "counter", "forward passes"),
    F("step_seconds", "counter",
      "seconds that steps took, by part: `schedule` (who computes what next), `tree` (admission, "
      "pages, what enters the cache), `copies` (begun and ended; the same with storage, and ranks "
      "that agree), `forward` (the model, and what it waits for pages that are loaded), `sample` "
      "(tokens chosen and answered)", ("part",)),
    F("known_tokens", "counter",
      "prompt tokens that the cache knew on any tier: cached and lost ones together"),
    F("lost_tokens", "counter", "known tokens that were computed all the same", ("tier", "reason"),
      see="[each reason](sizing.md#what-was-cached-and-computed-all-the-same)"),
)  # fmt: skip
OF_PAGES: Final = (
    F("pool_pages", "gauge",
      "pages that are `free`, `evictable` (cached, nobody stands on them) or `in_use`; together "
      "the pool", ("group", "tier", "state")),
    F("page_lifetime_seconds", "histogram",
      "seconds from a page's coming to a tier to its leaving it, of pages that have left: how long "
      "the cache remembers", ("group", "tier"), see="with `--kv-cache-metrics`"),
    F("page_idle_before_evict_seconds", "histogram",
      "seconds from a page's last use to its leaving a tier: near zero, what is cached leaves "
      "before anybody comes back", ("group", "tier"), see="with `--kv-cache-metrics`"),
    F("page_reuse_gap_seconds", "histogram",
      "seconds between two uses of a page, of pages that a request was given: above the idle time "
      "before they leave, more memory would be used", ("group",), see="with `--kv-cache-metrics`"),
    F("cache_copied_pages", "counter",
      "pages that were copied: `backup` to the host, `load` back to the device", ("direction",)),
    F("cache_copied_bytes", "counter", "the same in bytes", ("direction",)),
    F("cache_copies_in_flight", "gauge", "copies that have not ended, each of many pages",
      ("direction",)),
    F("cache_unsaved_pages", "counter",
      "pages that were to be copied to the host and were not: the copy `failed`, or there was "
      "`no_room`", ("reason",)),
    F("cache_evicted_pages", "counter", "pages that left a tier", ("tier",)),
    F("cache_dropped_pages", "counter",
      "pages that left the device without a host copy: `dirty`, or `cold`, which are windows and "
      "states that no checkpoint needed", ("reason",)),
    F("cache_load_waited", "counter",
      "steps in which a request waited because `--load-back-budget` was taken"),
    F("cache_duplicate_pages", "counter",
      "pages that were computed though the tree had them by then"),
    F("cache_snapshots", "counter", "states that requests gave to the cache"),
    F("cache_snapshots_skipped", "counter",
      "states that were not kept, because no page was left to go on with"),
    F("cache_spilled", "counter",
      "requests that, as they ran, left pages of selected rows on the host to go on",
      see="[sparse decode](sparse-decode.md)"),
    F("page_selection_queries", "counter",
      "with `--approximate-pages`: queries of which it was measured what they saw, the last of "
      "each chunk of a prompt in each layer, where something was left out",
      see="[sparse decode](sparse-decode.md#dense-models-approximately)"),
    F("page_selection_recall", "counter",
      "sum over them of the part of attention's weight that they saw: by their number, the recall"),
    F("cache_retracted", "counter", "requests that were retracted when pages ran short"),
    F("cache_retracted_pages", "counter", "pages that were saved for it, beyond what the host had"),
    F("cache_retracted_unsaved", "counter",
      "retracted requests that are computed again, here or by the server that computes prompts"),
    F("cache_copy_waits", "counter", "times an allocation waited for a copy under way"),
)  # fmt: skip
OF_STORAGE: Final = (
    F("storage_pages", "counter",
      "pages between host and storage: `stored`, `present` (storage had them), `refused` (no room, "
      "or writing was off), `failed`, `dropped` (the queue was full), `fetched`, `distrusted` "
      "(asked to be forgotten after a request on them failed)", ("event",)),
    F("storage_tokens", "counter",
      "prompt tokens that storage was asked for: `found`, and `hits`, which the request got",
      ("event",)),
    F("storage_lost_tokens", "counter", "tokens that were found and not given to the request",
      ("reason",)),
    F("storage_abandoned_prefetches", "counter", "fetches that brought nothing", ("reason",)),
    F("storage_off", "gauge",
      "1: `reading` or `writing` failed lately and is left alone for a while", ("direction",)),
)  # fmt: skip
OF_HAND_OFFS: Final = (
    F("transfer_sessions", "gauge",
      "of `--role prefill` and `decode`: sessions that are `bootstrapping` (the two servers do not "
      "know each other), `waiting_for_input` (for pages, or for the other side) or `transferring`",
      ("state",)),
    F("transfer_sessions_succeeded", "counter", "requests handed over"),
    F("transfer_sessions_failed", "counter",
      "those that were not: `aborted` here, `peer` (by the other side), `peer_lost`, `refused` "
      "(servers or prompts do not fit, or nobody can be reached), `timeout`, `rank` (on another "
      "rank), `protocol`", ("cause",)),
    F("transfer_pages", "gauge",
      "of `--role decode`: pages that a peer may still write (`leased`), and those of them that "
      "are past their deadline, or whose peer is lost (`quarantined`)", ("state",)),
    F("transfer_peers", "gauge",
      "places for peers that are taken, of 256: `joining`, `in_use` (a session is open, or its "
      "pages may still be written), `idle` (joined, without a session) and `ending`", ("state",)),
)  # fmt: skip
FAMILIES: Final = (*OF_REQUESTS, *OF_THE_ENGINE, *OF_PAGES, *OF_STORAGE, *OF_HAND_OFFS)
BY_NAME: Final = {family.name: family for family in FAMILIES}

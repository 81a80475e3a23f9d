"""Asks one server one question with the ``openai`` client, as any user would.

Owns the stopwatch.
"""

import re
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from typing import Final

from openai import OpenAI
from openai.types import CompletionUsage
from prometheus_client.parser import text_string_to_metric_families

from demo.script import Message
from demo.servers import PATIENCE_S

MOVED: Final = re.compile(r"stratakv_cache_(copied|evicted)_pages_total")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One streamed answer. ``first_s``: from sending the request to the first token;
    ``device``, ``host`` and ``storage``: prompt tokens that came from each tier."""

    text: str
    finish: str
    first_s: float
    prompt_tokens: int
    answer_tokens: int
    device: int
    host: int
    storage: int

    def same_answer(self, other: "Reply") -> bool:
        """Whether both are one answer, to the last token."""
        return (self.text, self.finish, self.answer_tokens) == (
            other.text,
            other.finish,
            other.answer_tokens,
        )


class Client:
    """``address``: of the server, without a path."""

    def __init__(self, address: str, answer_tokens: int) -> None:
        self._address = address
        self._answer_tokens = answer_tokens
        # A failure must be seen, and a second try would be a cache hit.
        self._api = OpenAI(
            base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )
        self._model = self._api.models.list().data[0].id

    def ask(self, messages: list[Message]) -> Reply:
        """Greedy, streamed."""
        start_s = time.perf_counter()
        first_s: float | None = None
        text, finish = "", ""
        usage: CompletionUsage | None = None
        for chunk in self._api.chat.completions.create(
            model=self._model,
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=self._answer_tokens,
            stream=True,
            stream_options={"include_usage": True},
        ):
            for choice in chunk.choices:
                if first_s is None:
                    first_s = time.perf_counter() - start_s
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
            usage = chunk.usage or usage
        assert first_s is not None, "the stream ended before its first token"
        assert usage is not None, "the stream has no usage, which include_usage asked for"
        assert usage.prompt_tokens_details is not None
        # Beyond OpenAI's fields: where the cached tokens came from.
        tiers = usage.prompt_tokens_details.model_extra["cached_tokens_by_tier"]
        return Reply(
            text=text,
            finish=finish,
            first_s=first_s,
            prompt_tokens=usage.prompt_tokens,
            answer_tokens=usage.completion_tokens,
            device=tiers["device"],
            host=tiers["host"],
            storage=tiers["storage"],
        )

    def forget(self) -> None:
        """Empty the server's cache."""
        request = urllib.request.Request(f"{self._address}/flush_cache", method="POST")
        urllib.request.urlopen(request, timeout=PATIENCE_S).close()

    def moved_pages(self) -> Counter[tuple[str, str]]:
        """Since the server started: pages "copied" by direction, and "evicted" by tier."""
        with urllib.request.urlopen(f"{self._address}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
        moved: Counter[tuple[str, str]] = Counter()
        for family in text_string_to_metric_families(text):
            for name, labels, value in (sample[:3] for sample in family.samples):
                if what := MOVED.fullmatch(name):
                    moved[what[1], labels.get("direction") or labels["tier"]] += int(value)
        return moved

    def close(self) -> None:
        self._api.close()

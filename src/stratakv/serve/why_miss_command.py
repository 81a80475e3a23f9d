"""``stratakv why-miss``: flags, the question to a server, and its answer in words.

Owns these. Looks at nothing but the answer.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, cast
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from stratakv.core.choices import check_written
from stratakv.core.errors import ConfigError

TIMEOUT_S: Final = 60.0
KEY: Final = "STRATAKV_ADMIN_KEY"
"""A variable: what stands on a command line, others see."""
Json = Mapping[str, Any]


def add_verb(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """``add_parser``: of the verbs of ``stratakv``."""
    parser = add_parser(
        "why-miss",
        help="why a running server has computed a prompt",
        description="Where the prompt of a request parts from earlier ones, which cache group "
        "stopped its reuse, what had been evicted and when. The key is that of STRATAKV_ADMIN_KEY, "
        "where the server has one. Exit code 0: there is an answer; 2: there is none.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "request",
        nargs="?",
        metavar="REQUEST",
        help="the id of an answer, your own rid, or the id= of the access log; one of the last",
    )
    parser.add_argument(
        "--prompts",
        nargs=2,
        metavar="FILE",
        help="in place of REQUEST, two bodies of requests: where the second parts from the first",
    )
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="of the server (default: http://127.0.0.1:8000)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the answer there")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    check_written("--json", arguments.json)
    if (arguments.request is None) is (arguments.prompts is None):
        raise ConfigError("--prompts: allowed is either REQUEST or --prompts FILE FILE")
    if not arguments.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {arguments.url}: allowed is http://HOST:PORT")
    if arguments.prompts is None:
        question: Json = {"request": arguments.request}
    else:
        question = {"prompts": [_body(path) for path in arguments.prompts]}
    found = _ask(arguments.url, question)
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    for one in found["requests"]:
        sys.stdout.write("\n".join(lines_of(one)) + "\n")
    return 0


def _body(path: str) -> Json:
    try:
        found: object = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompts {path}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--prompts {path}: allowed is a JSON object, the body of a request")
    return cast("Json", found)


def _ask(url: str, question: Json) -> Json:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    where = url.rstrip("/") + "/cache/why_miss"
    asked = Request(where, json.dumps(question).encode(), headers)
    try:
        with urlopen(asked, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except HTTPError as error:
        reason = _reason(error)
        if error.code == HTTPStatus.UNAUTHORIZED:
            reason += f"; allowed is the server's --admin-key, which is taken from {KEY}"
        raise ConfigError(f"--url {url}: {reason}") from error
    except (URLError, HTTPException, OSError, ValueError) as error:
        raise ConfigError(
            f"--url {url}: allowed is that of a stratakv server that runs; {error}"
        ) from error


def _reason(error: HTTPError) -> str:
    try:
        return json.loads(error.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"


def lines_of(one: Json) -> list[str]:
    """For people."""
    cached, count = one["cached"], one["prompt_tokens"]
    if cached is None:
        line = f"a prompt of {count} tokens: {one['usable']} could be reused at this moment"
    else:
        tiers = ", ".join(f"{name} {tokens}" for name, tokens in cached.items())
        line = f"request {one['request']}, {one['ago_s']:.1f} s ago: {count} tokens of prompt, "
        line += f"{sum(cached.values())} of them cached ({tiers})"
    lines = [line]
    if one["use"] not in {"default", "no-store"}:
        lines.append(f"  it was not to read the cache (cache: {one['use']})")
    lines += [f"  group {_stopped(each)}" for each in one["stopped"]]
    for each in one["evicted"]:
        lines.append(
            f"  tokens {each['start']} to {each['end'] - 1} left the cache {each['ago_s']:.1f} s "
            f"ago, the last copy from the {each['tier']}"
        )
    for each in one["lost"] or ():
        lines.append(
            f"  {each['tokens']} tokens that were known were computed: {each['tier']}, "
            f"{each['reason']}"
        )
    if one["lost"] is None and cached is not None:
        lines.append("  what storage does for it has not ended")
    return [*lines, f"  {_parting(one)}"]


def _stopped(each: Json) -> str:
    line = f"{each['group']} stopped it at token {each['end']}: it lacks {each['pages']} pages "
    line += f"from token {each['first']} on"
    left = [
        f"the {tier} {each[f'left_{tier}_s']:.1f} s ago"
        for tier in ("device", "host")
        if each[f"left_{tier}_s"] is not None
    ]
    line += f", which left {' and '.join(left)}" if left else ", which were not kept"
    return line if each["wanted"] else f"{line}; no checkpoint needs them"


_WORDS: Final = {
    "model": "they are of other models",
    "adapter": "they are of other adapters, so that no page is shared",
    "cache_salt": "they have other salts, so that no page is shared",
    "end": "one of them ends there",
}


def _parting(one: Json) -> str:
    parting, page = one["parting"], one["page_tokens"]
    if parting is None:
        return "no earlier prompt that is remembered begins like it"
    other = "the first" if parting["other"] is None else f"request {parting['other']}"
    tokens = parting["tokens"]
    line = (
        f"begins as {other} for {tokens} tokens, which are {tokens // page} whole pages of {page}"
    )
    if parting["difference"] == "token":
        return f"{line}; token {tokens} is another"
    return f"{line}; {_WORDS[parting['difference']]}"

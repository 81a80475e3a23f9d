"""``python -m demo.run``: play the script against two servers and show what the cache did.

Owns the order of a run and its exit code: 0 only where every answer was identical with the cache
and without it, both tiers served hits and both servers ended cleanly; else 1.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Final

from openai import OpenAIError

from demo import table
from demo.client import Client
from demo.script import PLAY, SYSTEM, Chats
from demo.servers import DemoError, Server, Servers

MODEL: Final = Path(__file__).parent.parent / "models" / "demo"
ANSWER_TOKENS: Final = 96
FLAGS: Final = (
    "--port", "0",
    "--threads", "1",
    # Exact figures: with rounded ones, two right ways to compute a prompt may differ in a token.
    "--dtype", "float32",
    "--page-tokens", "16",
    "--max-running", "2",
    "--max-model-len", "1280",
    "--device-memory", "2560KiB",
)  # fmt: skip
"""Of both servers. The device holds less than two of the four conversations."""
HOST: Final = ("--cache", "host", "--host-memory", "32MiB")
OFF: Final = ("--cache", "off")
LOG_LINES: Final = 60


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.run", description="The StrataKV demo.")
    parser.add_argument("--model", type=Path, default=MODEL, help="model directory (%(default)s)")
    model: Path = parser.parse_args(argv).model
    signal.signal(signal.SIGTERM, _terminated)
    with tempfile.TemporaryDirectory(prefix="stratakv-demo-") as logs:
        servers = Servers(Path(logs))
        try:
            with servers:
                failures = _play(servers, model)
        except KeyboardInterrupt:
            print("\ninterrupted; the servers were stopped")
            return 130
        except (DemoError, OpenAIError, OSError, AssertionError) as error:
            failures = [str(error)]
        for name, code in servers.exit_codes.items():
            if code and name not in " ".join(failures):
                failures.append(f"the server {name} ended with exit code {code}")
        if failures:
            _explain(failures, servers.started)
            return 1
    print("\nPASS: every answer was the same, both tiers served hits, both servers ended cleanly.")
    return 0


def _play(servers: Servers, model: Path) -> list[str]:
    """The whole run; returns what went wrong in it."""
    start_s = time.monotonic()
    print(f"Starting two servers on {model.name}: one with a cache, one without ...", flush=True)
    with_cache = servers.start("with cache", model, *FLAGS, *HOST)
    without = servers.start("without cache", model, *FLAGS, *OFF)
    with (
        closing(Client(with_cache.wait_ready(), ANSWER_TOKENS)) as cached,
        closing(Client(without.wait_ready(), ANSWER_TOKENS)) as plain,
    ):
        print(f"Ready after {time.monotonic() - start_s:.1f} s.\n\n{with_cache.budget()}\n")
        for client in (cached, plain):
            _warm_up(client)
        users = len({line.user for line in PLAY})
        print(f"{users} users share a system prompt; the device has no room for all their chats.\n")
        print(table.header())
        turns: list[table.Turn] = []
        for turn in _turns(cached, plain):
            turns.append(turn)
            print(table.row(turn), flush=True)
        moved = cached.counters()
    print(f"\n{table.excerpt(_readable(turns))}\n\n{table.summary(turns, moved)}")
    print(f"{'took':<21}{time.monotonic() - start_s:.1f} s")
    return table.failures(turns, len(PLAY))


def _warm_up(client: Client) -> None:
    """The first pass of a process pays for what later ones have; it would flatter the cache."""
    client.ask([{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello!"}])
    client.forget()


def _turns(cached: Client, plain: Client) -> Iterator[table.Turn]:
    """Each line goes to both servers, one after the other, with the same history: the answers that
    were given with the cache."""
    chats = Chats()
    for line in PLAY:
        messages = chats.asked(line)
        with_cache = cached.ask(messages)
        without = plain.ask(messages)
        number = chats.answered(line, with_cache.text)
        yield table.Turn(line=line, number=number, cached=with_cache, plain=without)


def _readable(turns: Sequence[table.Turn]) -> table.Turn:
    """The turn to show: the longest answer that rests on pages from the host."""
    return max(turns, key=lambda turn: (turn.cached.host > 0, len(turn.cached.text)))


def _explain(failures: Sequence[str], servers: Sequence[Server]) -> None:
    for server in servers:
        lines = server.text().splitlines()[-LOG_LINES:]
        print(f"\n--- log of the server {server.name}, its last {len(lines)} lines")
        print("\n".join(lines))
    print("\nFAIL:")
    for failure in failures:
        print(f"- {failure}")


def _terminated(number: int, _frame: FrameType | None) -> None:
    """As Ctrl-C does, so that the servers are stopped."""
    raise KeyboardInterrupt(signal.Signals(number).name)


if __name__ == "__main__":
    sys.exit(main())

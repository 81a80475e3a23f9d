"""``python -m demo.run``: play the script against two servers, restart the one with the cache, and
show what the cache did.

Owns the order of a run and its exit code: 0 only where every answer was identical with the cache
and without it, every tier served hits and every server ended cleanly; else 1.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Final

from openai import OpenAIError

from demo import table
from demo.client import Client
from demo.script import ENCORE, PLAY, SYSTEM, Chats, Line
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
"""Of all servers. The device holds less than two of the four conversations."""
HOST: Final = ("--cache", "host", "--host-memory", "32MiB")
FETCH: Final = (
    # What is known of a user is worth a fetch, a question is not.
    "--prefetch-threshold", "64",
    # A busy machine must not decide what the table shows.
    "--prefetch-policy", "wait-complete",
)  # fmt: skip
QUOTA: Final = "256MiB"
OFF: Final = ("--cache", "off")
SCENE: Final = (
    f"{len({line.user for line in PLAY})} users share a system prompt; "
    "the device has no room for all their chats."
)
RESTART: Final = "SIGTERM; the server with the cache starts again over the same storage"
LOG_LINES: Final = 60


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.run", description="The StrataKV demo.")
    parser.add_argument("--model", type=Path, default=MODEL, help="model directory (%(default)s)")
    model: Path = parser.parse_args(argv).model
    signal.signal(signal.SIGTERM, _terminated)
    with tempfile.TemporaryDirectory(prefix="stratakv-demo-") as directory:
        servers = Servers(Path(directory))
        try:
            with servers:
                failures = _play(servers, model, Path(directory, "store"))
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
    print("\nPASS: every answer was the same, every tier served hits, every server ended cleanly.")
    return 0


def _play(servers: Servers, model: Path, store: Path) -> list[str]:
    """The whole run; returns what went wrong in it."""
    start_s = time.monotonic()
    print(f"Starting two servers on {model.name}: one with a cache, one without ...", flush=True)
    kept = (*FLAGS, *HOST, "--storage", f"file://{store}?quota={QUOTA}", *FETCH)
    with_cache = servers.start("with cache", model, *kept)
    without = servers.start("without cache", model, *FLAGS, *OFF)
    address = with_cache.wait_ready()
    chats = Chats()
    with closing(Client(without.wait_ready(), ANSWER_TOKENS)) as plain:
        with closing(Client(address, ANSWER_TOKENS)) as cached:
            print(f"Ready after {time.monotonic() - start_s:.1f} s.\n\n{with_cache.budget()}\n")
            for client in (cached, plain):
                _warm_up(client)
            print(f"{SCENE}\n\n{table.header()}")
            turns = _shown(chats, PLAY, cached, plain)
            moved = cached.moved_pages()
        servers.end(with_cache)
        print(table.divider(RESTART), flush=True)
        again = servers.start("restarted", model, *kept)
        with closing(Client(again.wait_ready(), ANSWER_TOKENS)) as cached:
            _warm_up(cached)
            after = _shown(chats, ENCORE, cached, plain)
    print(f"\n{table.excerpt(_readable(turns))}\n\n{table.summary(turns, moved)}")
    print(f"\n{table.summary_of_restart(after)}")
    print(f"{'took':<21}{time.monotonic() - start_s:.1f} s")
    asked = len(PLAY) + len(ENCORE)
    return table.failures([*turns, *after], asked) + table.failures_of_restart(after)


def _warm_up(client: Client) -> None:
    """The first pass of a process pays for what later ones have; it would flatter the cache. Begins
    like no prompt of the play, since storage does not forget it."""
    system = f"This is a test. {SYSTEM}"
    client.ask([{"role": "system", "content": system}, {"role": "user", "content": "Hello!"}])
    client.forget()


def _shown(chats: Chats, play: Sequence[Line], cached: Client, plain: Client) -> list[table.Turn]:
    """Each line goes to both servers, one after the other, with the same history: the answers that
    were given with the cache. Prints each turn when it was played."""
    turns: list[table.Turn] = []
    for line in play:
        messages = chats.asked(line)
        with_cache = cached.ask(messages)
        without = plain.ask(messages)
        number = chats.answered(line, with_cache.text)
        turns.append(table.Turn(line=line, number=number, cached=with_cache, plain=without))
        print(table.row(turns[-1]), flush=True)
    return turns


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

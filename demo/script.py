"""What the demo's users say, and when. Owns the play; must not talk to a server."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

Message = dict[str, str]

HERE: Final = Path(__file__).parent
SYSTEM: Final = (HERE / "about.txt").read_text(encoding="utf-8").strip()
"""What every conversation begins with."""
NOTES: Final = dict(
    re.findall(r"^# (\w+)\n(.+)$", (HERE / "notes.txt").read_text(encoding="utf-8"), re.MULTILINE)
)
"""User -> what the server is told about them: the part of a prompt that is a user's own."""


@dataclass(frozen=True, slots=True)
class Line:
    """One user's question, in the order of the play."""

    user: str
    question: str


PLAY: Final = (
    Line("Ada", "What does str.split do?"),
    Line("Ben", "What is the with statement?"),
    Line("Cleo", "What is the yield statement?"),
    Line("Dan", "What does abs do?"),
    Line("Ada", "Explain the assert statement."),
    Line("Ben", "What is the try statement?"),
    Line("Cleo", "Explain the for statement."),
    Line("Dan", "What does callable do?"),
    Line("Dan", "What is the import statement?"),
    Line("Ada", "What is the del statement?"),
    Line("Ben", "Explain the raise statement."),
    Line("Cleo", "What is the break statement?"),
    Line("Cleo", "Explain the continue statement."),
    Line("Dan", "What does bytes.split do?"),
    Line("Ada", "Explain the global statement."),
    Line("Ben", "What is StopIteration?"),
    Line("Cleo", "What is the return statement?"),
    Line("Dan", "Tell me about the nonlocal statement."),
    Line("Ada", "Thanks, that helps."),
    Line("Ben", "Explain the while statement."),
)
"""Users come back after others have pushed them off the device; Dan and Cleo also ask twice in a
row, and then find everything where they left it."""
ENCORE: Final = (
    Line("Dan", "What does callable do?"),
    Line("Cleo", "What is the yield statement?"),
    Line("Ben", "What is the try statement?"),
    Line("Ada", "Explain the assert statement."),
)
"""After the server was restarted: everybody goes on where they were."""


def instructions(user: str) -> Message:
    """The system message of ``user``: shared text first, so that it can be shared."""
    return {"role": "system", "content": f"{SYSTEM}\n\n{NOTES[user]}"}


class Chats:
    """The conversation of every user so far."""

    def __init__(self) -> None:
        self._messages: dict[str, list[Message]] = {}

    def asked(self, line: Line) -> list[Message]:
        """The messages that go to a server for ``line``: all that was said before it, and it."""
        history = self._messages.setdefault(line.user, [instructions(line.user)])
        history.append({"role": "user", "content": line.question})
        return list(history)

    def answered(self, line: Line, text: str) -> int:
        """Record the answer to ``line``; returns which turn of its user that was, from 1."""
        history = self._messages[line.user]
        history.append({"role": "assistant", "content": text})
        return (len(history) - 1) // 2

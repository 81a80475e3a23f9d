"""Calls of functions in the text of an answer, as it comes.

Owns the forms in which models write calls, by vLLM's names of them. What is no whole call in such
a form stays text. However the text is cut into pieces, the same comes out. Must not know replies.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NoReturn, Protocol, TypeAlias, assert_never, cast

from stratakv.serve.errors import ApiError
from stratakv.serve.stops import overlap
from stratakv.serve.tools import AutoCall, NamedCall, RequiredCall, ToolUse


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What a call gained: a name and an id with its first part, arguments as JSON text."""

    index: int
    arguments: str
    name: str | None = None
    id: str | None = None


AnswerPart: TypeAlias = str | CallDelta
"""Text that is for the reader, or of a call."""


class ToolParser(Protocol):
    """Of one answer."""

    def feed(self, text: str) -> Sequence[AnswerPart]: ...

    def flush(self) -> Sequence[AnswerPart]:
        """What was held back: there will be no more text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes a call: one of ``opens``, a header, and JSON. ``header``: a regular
    expression of what is between both, whose group ``name`` is the function's, where the JSON is
    the arguments alone; else that is an object with the name and the arguments, or an array of
    such. ``bare``: the JSON of a call may also stand at the beginning of the answer, or behind
    another call. ``around``: what may stand there too, and is left out. ``special``: some of these
    are special tokens. ``id``: makes one."""

    opens: tuple[str, ...] = ()
    header: str = r"\s*"
    bare: bool = False
    around: tuple[str, ...] = ()
    special: bool = True
    id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"


ALPHABET: Final = string.ascii_letters + string.digits


def _nine_characters() -> str:
    """As Mistral's templates demand."""
    return "".join(secrets.choice(ALPHABET) for _ in range(9))


_NAME: Final = r"(?P<name>[^\s\[\]{}<>|]+)"
_DEEPSEEK: Final = ToolFormat(
    opens=("<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁call▁begin\uff5c>"),
    header=rf"\s*(?:<\uff5ctool▁call▁begin\uff5c>)?\s*{_NAME}\s*<\uff5ctool▁sep\uff5c>\s*",
    around=("<\uff5ctool▁call▁end\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"),
)
FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": ToolFormat(opens=("<tool_call>",), around=("</tool_call>",), special=False),
    "llama3_json": ToolFormat(opens=("<|python_tag|>",), bare=True, around=(";", "<|eom_id|>")),
    "mistral": ToolFormat(
        opens=("[TOOL_CALLS]",),
        header=rf"\s*(?:{_NAME}\s*(?:\[CALL_ID\][^\s\[\]{{}}]*)?(?:\[ARGS\])?\s*)?",
        id=_nine_characters,
    ),
    "deepseek_v3": replace(
        _DEEPSEEK,
        header=r"\s*(?:<\uff5ctool▁call▁begin\uff5c>)?\s*function\s*<\uff5ctool▁sep\uff5c>"
        rf"{_NAME}\s*(?:```json\s*)?",
        around=(*_DEEPSEEK.around, "```"),
    ),
    "deepseek_v31": _DEEPSEEK,
}
"""By vLLM's names; those of ``choices.TOOL_CALL_PARSERS``."""
REQUIRED: Final = ToolFormat(bare=True, around=("[", ",", "]"), special=False)
"""What ``tools.RequiredCall`` binds an answer to."""
MAX_HEADER_CHARS: Final = 512
BRACKETS: Final = re.compile(r'[\[\]{}"\\]')
OPENING: Final = re.compile(r"[\[{]")


def format_of(name: str, template: str) -> ToolFormat | None:
    """That of ``--tool-call-parser``, for a model with that chat template."""
    return detected(template) if name == "auto" else FORMATS[name]


def detected(template: str) -> ToolFormat | None:
    """In which form a model writes calls whose chat template that is; None: in none known here."""
    if "<tool_call>" in template and "<function=" not in template:
        return FORMATS["hermes"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<\uff5ctool▁calls▁begin\uff5c>" in template:
        return FORMATS["deepseek_v3" if "```json" in template else "deepseek_v31"]
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return FORMATS["llama3_json"]
    return None


class _JsonEnd:
    """Where the object or array ends that begins at ``start`` of a text. Linear in the text."""

    def __init__(self, start: int) -> None:
        self._at = start
        self._depth = 0
        self._in_string = False

    def closes_at(self, text: str) -> int | None:
        """``text``: that of the last call, with more behind it."""
        while (found := BRACKETS.search(text, self._at)) is not None:
            self._at = found.end()
            match found.group():
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._at += self._in_string  # what it escapes
                case _ if self._in_string:
                    pass
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth == 0:
                        return self._at
        self._at = max(self._at, len(text))
        return None


class MarkedCalls:
    """Calls in a ``ToolFormat``, each of which comes whole. ``parallel``: else only the first
    counts. Space around calls is no text."""

    def __init__(self, form: ToolFormat, *, parallel: bool = True) -> None:
        self._form = form
        self._header = re.compile(form.header)
        self._parallel = parallel
        self._calls = 0
        self._text = ""  # not decided yet; it begins with a call's opening where one is open
        self._space = ""  # before that
        self._open: int | None = None  # characters of the opening; None: no call is open
        self._name: str | None = None
        self._json: tuple[int, _JsonEnd] | None = None  # where it begins
        self._between = form.bare  # nothing but space, since the beginning or the last call

    def feed(self, text: str) -> list[AnswerPart]:
        self._text += text
        return self._decided(last=False)

    def flush(self) -> list[AnswerPart]:
        found = self._decided(last=True)
        rest = self._space + self._text
        self._space = self._text = ""
        if rest and (self._open is not None or not self._between or not self._calls):
            found.append(rest)
        return found

    def _decided(self, *, last: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while True:
            if self._open is None:
                going_on = self._outside(parts, last=last)
            elif self._json is None:
                going_on = self._in_header(parts, last=last)
            else:
                going_on = self._in_json(parts, *self._json)
            if not going_on:
                return parts

    def _outside(self, parts: list[AnswerPart], *, last: bool) -> bool:
        """Up to where a call opens."""
        if self._between:
            text = self._text.lstrip()
            for mark in self._form.around:
                if text.startswith(mark) and self._marks_count:
                    self._text = text[len(mark) :]
                    return True
            marks = (*self._form.around, *self._form.opens)
            if not last and any(mark.startswith(text) for mark in marks):
                return False
            if self._form.bare and text.startswith(("{", "[")):
                self._space, self._text = self._text[: len(self._text) - len(text)], text
                self._begin(0)
                return True
            self._between = False
            if self._calls:
                self._text = text
        places = [(at, mark) for mark in self._form.opens if (at := self._text.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            body = self._text[:at].rstrip()
            self._space, self._text = self._text[len(body) : at], self._text[at:]
            self._begin(len(mark))
        else:
            held = max((overlap(self._text, mark) for mark in self._form.opens), default=0)
            body = self._text[: len(self._text) - held].rstrip()
            self._text = self._text[len(body) :]
        if body:
            parts.append(body)
        return bool(places)

    @property
    def _marks_count(self) -> bool:
        """What stands around calls is no text behind one, or where it opens the first."""
        return bool(self._calls) or not self._form.opens

    def _begin(self, opening: int) -> None:
        self._open, self._name, self._json = opening, None, None

    def _in_header(self, parts: list[AnswerPart], *, last: bool) -> bool:
        assert self._open is not None
        end = self._open + MAX_HEADER_CHARS
        for found in OPENING.finditer(self._text, self._open, end):
            at = found.start()
            header = self._header.fullmatch(self._text, self._open, at)
            if header is None:
                continue
            name = header.groupdict().get("name")
            if name is None or found.group() == "{":
                self._name, self._json = name, (at, _JsonEnd(at))
                return True
        if not last and len(self._text) < end:
            return False
        self._no_call(parts, max(1, self._open))
        return True

    def _in_json(self, parts: list[AnswerPart], start: int, json_end: _JsonEnd) -> bool:
        end = json_end.closes_at(self._text)
        if end is None:
            return False
        calls = _calls_in(self._text[start:end], self._name)
        if calls is None:
            self._no_call(parts, end)
            return True
        for name, arguments in calls:
            if self._parallel or not self._calls:
                parts.append(CallDelta(self._calls, arguments, name, self._form.id()))
            self._calls += 1
        self._text, self._space = self._text[end:], ""
        self._open, self._between = None, True
        return True

    def _no_call(self, parts: list[AnswerPart], end: int) -> None:
        """What seemed to be one is text, up to ``end``."""
        parts.append(self._space + self._text[:end])
        self._text, self._space = self._text[end:], ""
        self._open, self._between = None, False


class NamedArguments:
    """The answer is the arguments of one call of ``name``, as they come."""

    def __init__(self, name: str, id_: str) -> None:
        self._next: CallDelta | None = CallDelta(0, "", name, id_)

    def feed(self, text: str) -> list[AnswerPart]:
        if not text:
            return []
        first, self._next = self._next, None
        return [CallDelta(0, text) if first is None else replace(first, arguments=text)]

    def flush(self) -> list[AnswerPart]:
        return []


def _calls_in(text: str, name: str | None) -> list[tuple[str, str]] | None:
    """Names and arguments of the calls in a JSON text, ``name``: where that is the arguments alone;
    None: it is something else."""
    try:
        value: object = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # no reply can spell a lone surrogate
    except (ValueError, RecursionError):
        return None
    if name is not None:
        return [(name, text)] if isinstance(value, dict) else None
    items = cast("list[object]", value) if isinstance(value, list) else [value]
    found = [_call(one) for one in items]
    return [one for one in found if one is not None] if found and None not in found else None


def _call(value: object) -> tuple[str, str] | None:
    if not isinstance(value, dict):
        return None
    data = cast("dict[str, object]", value)
    name, arguments = data.get("name"), data.get("arguments", data.get("parameters"))
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):  # some models spell them twice
        inner = _calls_in(arguments, name)
        return None if inner is None else inner[0]
    if not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def no_parser() -> ToolParser | None:
    """Of an answer that calls nothing."""
    return None


def parser_of(use: ToolUse | None, form: ToolFormat | None) -> ToolParser | None:
    """Of one answer that may call what ``use`` allows, from a model that writes calls in ``form``.
    ApiError where that is not known and matters."""
    if use is None:
        return None
    match use.choice:
        case NamedCall(name):
            return NamedArguments(name, (form or REQUIRED).id())
        case RequiredCall():
            required = REQUIRED if form is None else replace(REQUIRED, id=form.id)
            return MarkedCalls(required, parallel=use.parallel)
        case AutoCall() if form is not None:
            return MarkedCalls(form, parallel=use.parallel)
        case AutoCall():
            message = "in which form this model writes calls is not known: --tool-call-parser of "
            message += "the server says it; 'tool_choice': \"required\" needs none"
            raise ApiError(message, param="tool_choice", code="unsupported_parameter")
        case _:
            assert_never(use.choice)

"""Words that a shell completes, from the parsers themselves. Owns the script for bash."""

from collections.abc import Iterator
from itertools import chain
from typing import Final

from stratakv.core.flag_help import CHOICES
from stratakv.core.flag_parser import FlagParser

_SCRIPT: Final = """\
# bash completion of stratakv: source <(stratakv completion bash)
_stratakv() {{
  local words="" word current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  local offered=""
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$words $word" in
      {verbs}) words="$words $word" ;;
    esac
  done
  case "$before" in
{values}
    *) case "$words" in
{flags}
    esac ;;
  esac
  COMPREPLY=($(compgen -W "$offered" -- "$current"))
}}
complete -o default -F _stratakv stratakv
"""


def bash_completion(parser: FlagParser) -> str:
    """Verbs, flags of a verb, and values of a flag that are a list; file names for the rest."""
    found = dict(_parsers(parser, ""))
    values = {f"--{name.replace('_', '-')}": " ".join(words) for name, words in CHOICES.items()}
    return _SCRIPT.format(
        verbs="|".join(f'"{words}"' for words in found if words),
        values="\n".join(f'    {flag}) offered="{text}" ;;' for flag, text in values.items()),
        flags="\n".join(
            f'      "{words}") offered="{" ".join(chain(part.parts, part.flags()))}" ;;'
            for words, part in found.items()
        ),
    )


def _parsers(parser: FlagParser, words: str) -> Iterator[tuple[str, FlagParser]]:
    yield words, parser
    for word, part in parser.parts.items():
        yield from _parsers(part, f"{words} {word}")

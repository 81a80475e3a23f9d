"""What is known of the mutants of a package, in one file that is committed.

Owns the file's form. By function, wherever it lies in the package: a digest of its code, mutants
that were killed or ended as hung (digests of what was changed), and in words those that survived. A
mutant without an entry has not been run. Where the code of a function changes, its mutants are run
again. Those that nothing could tell from the code are in ``EQUIVALENT``, each with the reason, by
function and in the same words; nobody but a person writes there.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from scripts.mutants.mutations import Mutant, digest, functions_of, mutants_of
from scripts.mutants.rooms import LEFT_OUT
from scripts.mutants.zygote import ROOT, Verdict

PLACE: Final = ROOT / "tests" / "mutants"
EQUIVALENT: Final = PLACE / "equivalent.json"


@dataclass(slots=True)
class Function:
    code: str
    mutants: int
    killed: set[str] = field(default_factory=set)
    hung: set[str] = field(default_factory=set)
    survived: set[str] = field(default_factory=set)
    equivalent: dict[str, str] = field(default_factory=dict)

    def knows(self, mutant: Mutant) -> bool:
        short = digest(mutant.text)
        return short in self.killed | self.hung or mutant.text in self.survived

    def note(self, mutant: Mutant, verdict: Verdict) -> None:
        short = digest(mutant.text)
        self.killed.discard(short)
        self.hung.discard(short)
        self.survived.discard(mutant.text)
        match verdict:
            case Verdict.KILLED:
                self.killed.add(short)
            case Verdict.HUNG:
                self.hung.add(short)
            case Verdict.SURVIVED | Verdict.NOT_SWAPPED:
                self.survived.add(mutant.text)


class Results:
    """Of one package, for instance ``tree`` or ``storage/file``."""

    def __init__(self, room: str) -> None:
        self.room = room
        self._path = PLACE / f"{room.replace('/', '_')}.json"
        self.mutants: dict[str, list[Mutant]] = {}
        codes: dict[str, str] = {}
        package = ROOT / "src/stratakv" / room
        paths = [p for p in sorted(package.glob("*.py")) if f"{room}/{p.name}" not in LEFT_OUT]
        owners = Counter(name for path in paths for name in functions_of(path))
        for path in paths:
            found = functions_of(path)
            for mutant in mutants_of(path):
                name = mutant.function
                # Two of one name: the module tells them apart, and has its own lines.
                plain = name and owners[name] == 1
                name = name if plain else f"{path.stem}:{name}".rstrip(":")
                self.mutants.setdefault(name, []).append(mutant)
                codes[name] = found[mutant.function]
        self.functions = self._read(codes)

    def _read(self, codes: dict[str, str]) -> dict[str, Function]:
        held = json.loads(self._path.read_text()) if self._path.exists() else {}
        alike = json.loads(EQUIVALENT.read_text()).get(self.room, {})
        functions: dict[str, Function] = {}
        for name, mutants in self.mutants.items():
            function = functions[name] = Function(codes[name], len(mutants))
            before = held.get(name, {})
            texts = {mutant.text for mutant in mutants}
            reasons = alike.get(name, {})
            function.equivalent = {text: why for text, why in reasons.items() if text in texts}
            if before.get("code") == codes[name]:
                shorts = set(map(digest, texts))
                function.killed = set(before.get("killed", "").split()) & shorts
                function.hung = set(before.get("hung", "").split()) & shorts
                function.survived = set(before.get("survived", [])) & texts
        return functions

    def write(self) -> None:
        table = {
            name: {
                "code": function.code,
                "mutants": function.mutants,
                "killed": " ".join(sorted(function.killed)),
                "hung": " ".join(sorted(function.hung)),
                "survived": sorted(function.survived - set(function.equivalent)),
            }
            for name, function in sorted(self.functions.items())
        }
        table = {
            name: {key: value for key, value in row.items() if value} for name, row in table.items()
        }
        PLACE.mkdir(exist_ok=True)
        text = json.dumps(table, indent=1, ensure_ascii=False)
        self._path.write_text(text + "\n")

    def left(self, *, again: bool, quick: bool) -> list[tuple[str, Mutant]]:
        """What is to be run, a sample of every function first, and last, unless ``quick``, what
        takes an import of its own. ``again``: survivors too, before all others."""
        found: list[tuple[bool, bool, int, str, str, Mutant]] = []
        for name, mutants in self.mutants.items():
            function = self.functions[name]
            fresh = [
                mutant
                for mutant in mutants
                if mutant.text not in function.equivalent
                and (mutant.swappable or not quick)
                and (not function.knows(mutant) or (again and mutant.text in function.survived))
            ]
            by_chance = sorted(fresh, key=lambda mutant: digest(name + mutant.text))
            found += [
                (
                    not mutant.swappable,
                    not function.knows(mutant),
                    at,
                    digest(mutant.text),
                    name,
                    mutant,
                )
                for at, mutant in enumerate(by_chance)
            ]
        return [(name, mutant) for *_, name, mutant in sorted(found, key=lambda row: row[:5])]

    def counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for function in self.functions.values():
            counts["mutants"] += function.mutants
            alike = set(map(digest, function.equivalent))
            counts["killed"] += len(function.killed - alike)
            counts["hung"] += len(function.hung - alike)
            counts["equivalent"] += len(function.equivalent)
            counts["survived"] += len(function.survived - set(function.equivalent))
        known = ("killed", "hung", "equivalent", "survived")
        counts["not run"] = counts["mutants"] - sum(counts[name] for name in known)
        return counts

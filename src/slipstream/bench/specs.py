"""How a method is written on the command line: a name, and settings behind a colon.

    eagle3                            the method's defaults
    eagle3+lookup                     united with prompt lookup
    eagle3:chain                      another tree; its name comes first behind the colon
    eagle3:budget=16,depth=5,topk=6   settings of the method
    eagle3+lookup:dynamic,budget=24   both

Several are separated by commas: a piece of the form `name=value` belongs to the method before
it. The table and the JSON name a method by what was typed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from slipstream import methods
from slipstream.errors import SettingError, UnknownNameError

AUTO = "auto"
NUMBERS = ("budget", "depth", "topk", "width")
TEXTS = ("tree", "verifier", "drafter")
SYNTAX = (
    "METHOD[+lookup][:TREE][,budget=N|auto][,depth=N][,topk=N][,width=N][,verifier=RULE]"
    "[,drafter=FOLDER]"
)


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A method with its settings.

    Args:
        name: as typed.
        method: a name of the catalogue.
        settings: keyword arguments of `slipstream.load`.
    """

    name: str
    method: str
    settings: dict[str, object] = field(default_factory=dict)


PLAIN = MethodSpec("none", "none")


def parse_spec(text: str) -> MethodSpec:
    """Read one method with its settings.

    Raises:
        UnknownNameError: method or setting is in no catalogue.
        SettingError: a number is below 1, or a setting is written in another way.

    Example:
        >>> parse_spec("eagle3+lookup:chain,depth=4").settings
        {'lookup': True, 'tree': 'chain', 'depth': 4}
    """
    name = text.strip()
    head, _, tail = name.partition(":")
    method, plus, extra = head.partition("+")
    methods.get(method)
    settings: dict[str, object] = {}
    if plus:
        if extra != "lookup":
            raise UnknownNameError("addition", extra, ["lookup"])
        settings["lookup"] = True
    for place, piece in enumerate(tail.split(",") if tail else ()):
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not equals and place == 0 and key:
            key, value = "tree", key
        elif not equals or not value:
            raise SettingError("method", f"'{name}'", SYNTAX, "write settings as name=value")
        settings[key] = _value(key, value)
    return MethodSpec(name, method, settings)


def _value(key: str, value: str) -> object:
    if key == "budget" and value == AUTO:
        return value
    if key in NUMBERS:
        if not value.lstrip("-").isdigit() or int(value) < 1:
            raise SettingError(key, value, "a whole number, 1 or more")
        return int(value)
    if key not in TEXTS:
        raise UnknownNameError("setting", key, (*NUMBERS, *TEXTS))
    return value


def parse_specs(text: str) -> list[MethodSpec]:
    """Read a comma-separated list; plain decoding comes first, also when it is not there.

    Raises:
        SettingError: the list is empty, or names a method twice.

    Example:
        >>> [s.name for s in parse_specs("ngram,eagle3:budget=16,depth=5")]
        ['none', 'ngram', 'eagle3:budget=16,depth=5']
    """
    texts: list[str] = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        if texts and re.match(r"^\w+\s*=", piece):
            texts[-1] += ("," if ":" in texts[-1] else ":") + piece
        else:
            texts.append(piece)
    if not texts:
        raise SettingError("methods", f"'{text}'", SYNTAX, "for example --methods ngram,eagle3")
    specs = [parse_spec(each) for each in texts]
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise SettingError("methods", f"'{name}' twice", "each method once")
    return [PLAIN, *(spec for spec in specs if spec.name != PLAIN.name)]

"""Imports point down, borders hold, and every public thing says what it is."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "src" / "slipstream"
FILES = sorted(ROOT.rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]

# What each layer may import besides itself; the list of docs/architecture, top to bottom.
GROUND = {"types", "errors", "shapes", "sampling"}
ALLOWED = {
    "errors": set(),
    "shapes": {"errors"},
    "types": {"errors", "shapes"},
    "sampling": {"types", "errors", "shapes"},
    "methods": {"errors"},
    "trees": GROUND,
    "cache": GROUND,
    "target": GROUND | {"cache", "trees"},
    "models": GROUND | {"trees", "cache", "target.protocol"},
    "verify": GROUND | {"trees"},
    "formats": GROUND | {"models", "target.protocol"},
    "drafters": GROUND
    | {"models", "trees", "cache", "formats"}
    | {f"target.{name}" for name in ("protocol", "packed", "hf", "stack", "tiles", "library")},
    "engine": GROUND
    | {"drafters.protocol", "verify.protocol", "target.protocol", "cache", "trees"}
    | {"target.hardware"},
    "data": GROUND | {"engine", "target", "models"},
    "train": GROUND | {"models", "data", "formats", "trees", "cache"},
    "parity": GROUND | {"methods", "assemble", "models", "data", "train", "formats"},
    "bench": GROUND
    | {"methods", "engine", "data", "target", "trees", "verify", "drafters", "models", "formats"}
    | {"assemble"},
    "tune": GROUND
    | {"methods", "engine", "data", "target", "trees", "verify", "drafters.protocol", "bench"},
    "serve": GROUND | {"engine", "target", "verify", "tune"},
    "report": GROUND | {"bench", "methods"},
    "assemble": GROUND
    | {"methods", "engine", "drafters", "verify", "target", "trees", "models", "formats"},
    "custom_generate": GROUND | {"assemble", "engine", "target"},
    "__init__": {"methods", "assemble", "drafters", "engine", "types", "custom_generate"}
    | {"formats"},
    "__main__": {"cli"},
}
TOP = {"cli"}  # may import everything
FORBIDDEN_NAMES = {"utils", "common", "helpers", "misc"}
BORDERS = {
    "transformers": {"target/hf.py"},
    "accelerate": {"train/loop.py", "train/checkpoint.py"},
    "peft": {"train/adapters.py"},
    "fastapi": {"serve"},
    "uvicorn": {"cli/serve.py"},
    "llguidance": {"serve/grammar.py", "serve/trial.py"},
    "typer": {"cli"},
    "rich": {"cli"},
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> list[str]:
    """Every module a file imports, also inside functions."""
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "slipstream":
                found += [f"slipstream.{alias.name}" for alias in node.names]
            else:
                found.append(node.module or "")
    return found


def layer(name: str) -> str:
    """`engine/step.py` is of the layer engine, `types.py` of types."""
    return name.split("/")[0].removesuffix(".py")


def is_allowed(importer: str, module: str) -> bool:
    """May a file of this layer import `slipstream.<module>`?"""
    head = module.split(".")[0]
    if importer in TOP or head == importer:
        return True
    allowed = ALLOWED[importer]
    return head in allowed or any(
        module == one or module.startswith(f"{one}.") for one in allowed if "." in one
    )


def is_within(name: str, places: set[str]) -> bool:
    return name in places or layer(name) in places


@pytest.mark.parametrize("name", NAMES)
def test_imports_point_down(name: str) -> None:
    importer = layer(name)
    assert importer in ALLOWED or importer in TOP, f"{name}: give its layer a line in ALLOWED"
    inside = [
        m.removeprefix("slipstream.") for m in imports(ROOT / name) if m[:11] == "slipstream."
    ]
    wrong = [module for module in inside if not is_allowed(importer, module)]
    assert not wrong, f"{name} imports {wrong}"


@pytest.mark.parametrize("library", BORDERS)
def test_a_library_stays_behind_its_border(library: str) -> None:
    users = {n for n in NAMES if any(m.split(".")[0] == library for m in imports(ROOT / n))}
    assert {n for n in users if not is_within(n, BORDERS[library])} == set()


def test_the_rules_can_fail() -> None:
    """The checks see what they look for."""
    assert not is_allowed("engine", "drafters.ngram") and is_allowed("engine", "drafters.protocol")
    assert not is_allowed("verify", "engine.step") and not is_allowed("train", "engine")
    assert "transformers" in [m.split(".")[0] for m in imports(ROOT / "target" / "hf.py")]


def test_no_module_is_a_drawer_for_everything() -> None:
    assert not [n for n in NAMES if FORBIDDEN_NAMES & {p.removesuffix(".py") for p in n.split("/")}]


@pytest.mark.parametrize("name", NAMES)
def test_public_things_have_docstrings(name: str) -> None:
    tree = parsed(ROOT / name)
    missing = [] if ast.get_docstring(tree) else ["the module"]
    places = [(tree, "")]
    while places:
        place, prefix = places.pop()
        for node in place.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                missing.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                places.append((node, f"{prefix}{node.name}."))
    assert not missing, f"{name}: {missing}"


def test_nothing_prints_outside_the_command_line() -> None:
    printing = [
        name
        for name in NAMES
        if layer(name) != "cli"
        and any(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
            for node in ast.walk(parsed(ROOT / name))
        )
    ]
    assert not printing

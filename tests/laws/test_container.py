"""The container file names what is there. Building it takes an engine that tests do not have."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from slipstream.cli.main import VERBS

ROOT = Path(__file__).resolve().parents[2]
LINES = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text(encoding="utf-8")).splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def told(word: str) -> list[str]:
    """What follows an instruction, each time it is given."""
    return [line.partition(" ")[2] for line in LINES if line.startswith(f"{word} ")]


def test_everything_copied_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    copied = [name for line in told("COPY") for name in line.split()[:-1]]
    assert {"pyproject.toml", "src", "zoo"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists() and name not in ignored, name
    for name in ("README.md", *PROJECT["license-files"]):  # the build of the package reads them
        assert name in copied


@pytest.mark.parametrize("name", ["TORCH", "MODEL"])
def test_pins_are_those_of_the_makefile(name: str) -> None:
    pins = dict(re.findall(rf"^({name}) [?:]= (\S+)", (ROOT / "Makefile").read_text(), re.M))
    assert f'{name}="{pins[name]}"' in told("ARG")


def test_it_installs_and_starts_what_exists() -> None:
    runs, entry = " ".join(told("RUN")), told("ENTRYPOINT")[0]
    for extra in re.findall(r"'\.\[(\w+)\]'", runs):
        assert extra in PROJECT["optional-dependencies"]
    command, verb = re.findall(r'"([^"]+)"', entry)[:2]
    assert command in PROJECT["scripts"] and verb in VERBS
    least = tuple(int(n) for n in re.findall(r"\d+", PROJECT["requires-python"]))
    assert tuple(int(n) for n in re.findall(r"python:(\d+)\.(\d+)", told("FROM")[0])[0]) >= least


def test_the_user_owns_the_cache_that_a_volume_is_mounted_on() -> None:
    user = told("USER")[0]
    assert f"install -d -o {user} -g {user} /home/{user}/.cache" in " ".join(told("RUN"))
    assert f":/home/{user}/.cache" in (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")

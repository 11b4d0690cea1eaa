import tomllib
from importlib import resources
from pathlib import Path

import pytest

from slipstream.data.conversations import read_rows

BENCHMARK = Path(str(resources.files("slipstream"))) / "assets" / "benchmark"
ROWS = {
    "mt_bench": 80,
    "gsm8k_test": 200,
    "humaneval": 164,
    "mbpp_test": 500,
    "multilingual_mix": 112,
    "spec_bench": 480,
}
LICENCES = {  # a phrase of the text to the name in the table
    "Apache License": "Apache-2.0",
    "MIT License": "MIT",
    "Open Data Commons": "ODC-By-1.0",
    "Creative Commons": "CC-BY-4.0",
}


@pytest.mark.parametrize("name", ROWS)
def test_a_prompt_set_has_its_rows_and_its_licence(name):
    rows = list(read_rows(BENCHMARK / f"{name}.jsonl.gz"))
    assert len(rows) == ROWS[name] == len({row.id for row in rows})
    assert all(m.role == "user" and m.content.strip() for row in rows for m in row.messages)
    assert not any(row.has_answer for row in rows)
    licence = (BENCHMARK / "LICENSES" / f"{name}.txt").read_text(encoding="utf-8")
    readme = (BENCHMARK / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in readme.splitlines() if line.startswith(f"| `{name}`")]
    named = [short for phrase, short in LICENCES.items() if phrase in licence]
    assert named and all(short in line for short in named)
    assert f"| {ROWS[name]} |" in line


def test_nothing_else_ships_and_it_stays_small():
    sets = {path.name.removesuffix(".jsonl.gz") for path in BENCHMARK.glob("*.gz")}
    assert sets == set(ROWS)
    assert sum(p.stat().st_size for p in BENCHMARK.rglob("*") if p.is_file()) < 1_000_000


def test_two_turns_where_the_set_has_two():
    rows = list(read_rows(BENCHMARK / "mt_bench.jsonl.gz"))
    assert [len(row.messages) for row in rows] == [2] * 80
    assert rows[0].id == "81" and rows[0].source == "writing"


def test_the_wheel_takes_every_file_of_the_assets():
    project = Path(__file__).parents[2] / "pyproject.toml"
    settings = tomllib.loads(project.read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["slipstream"]
    package = BENCHMARK.parents[1]
    taken = {path for pattern in patterns for path in package.glob(pattern)}
    assets = [path for path in (package / "assets").rglob("*") if path.is_file()]
    assert set(assets) <= taken and len({path.parent for path in assets}) > 2

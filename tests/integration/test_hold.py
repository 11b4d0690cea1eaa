"""Outputs that grow are written by one process at a time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slipstream.data.answers import AnswersFile
from slipstream.data.hold import Hold
from slipstream.errors import DataError, OutputError

pytest.importorskip("fcntl")
HOLDER = """
import sys
from pathlib import Path
from slipstream.data.hold import Hold
hold = Hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder():
    """Starts another process that holds a path; it is killed at the end."""
    started = []

    def start(path):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_what_another_process_writes_is_refused_until_it_ends(holder, tmp_path):
    process = holder(tmp_path)
    with pytest.raises(OutputError, match="another process is writing"):
        Hold(tmp_path)
    process.kill()  # nothing stays locked
    process.wait()
    with Hold(tmp_path):
        pass


def test_the_answers_of_another_process_keep_their_half_row(holder, tmp_path):
    """Whoever resumes cuts half a row off, which another process may just be writing."""
    path = tmp_path / "answers.jsonl"
    path.write_text('{"id": "a", "response_ids": [1]}\n{"id": "b", "resp')
    before = path.read_bytes()
    holder(path)
    with pytest.raises(OutputError, match="another process"):
        AnswersFile(path, settings={}, resume=True)
    assert path.read_bytes() == before


def test_a_file_that_is_refused_is_not_held_any_longer(tmp_path):
    """Whoever mends the line goes on, in the same process too."""
    path = tmp_path / "answers.jsonl"
    path.write_text("no row\n")
    with pytest.raises(DataError, match="not a row"):
        AnswersFile(path, settings={}, resume=True)
    path.write_text('{"id": "a", "response_ids": [1]}\n')
    with AnswersFile(path, settings={}, resume=True) as answers:
        assert "a" in answers


def test_features_and_runs_of_another_process_are_refused(holder, slipstream, tmp_path):
    answers = tmp_path / "answers.jsonl"
    answers.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    for name, words in (
        ("store", ("data", "extract", "--data", answers)),
        ("run", ("train", "--data", answers, "--steps", 1)),
    ):
        output = tmp_path / name
        output.mkdir()
        holder(output)
        code, _, err = slipstream(*words, "--output", output)
        assert code != 0 and "another process is writing" in err and "Traceback" not in err
        assert not any(output.iterdir())

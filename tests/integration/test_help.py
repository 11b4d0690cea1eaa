"""Help costs nothing, and every verb that help names exists."""

import os
import subprocess
import sys

import pytest

from slipstream.cli.main import VERBS, load_verb

HEAVY = ("torch", "transformers", "numpy", "rich", "jinja2", "pydantic", "safetensors")


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from slipstream.cli.main import main\n"
        "sys.argv = ['slipstream', '--help']\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"
    assert all(f"  {verb} " in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_of_the_table_has_its_file(verb):
    command = load_verb(verb)
    assert command.name == verb
    assert command.help


def test_an_unknown_verb_suggests_neighbours(slipstream):
    code, out, err = slipstream("genrate")
    assert (code, out) == (2, "")
    assert "Did you mean: generate" in err


def test_an_unknown_option_is_one_error(slipstream):
    code, out, err = slipstream("generate", "--bugdet", "3")
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and "--bugdet" in err and "Traceback" not in err


def test_no_arguments_show_help(slipstream):
    code, out, _ = slipstream()
    assert code == 0
    assert "Usage: slipstream" in out


def test_a_group_without_a_verb_shows_help_not_a_complaint(slipstream):
    code, out, err = slipstream("data")
    assert (code, out) == (2, "")
    assert err.startswith("Usage: slipstream data") and "error:" not in err


def test_nobody_reads_is_not_the_answer_no():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", "methods", "--json"],
        stdout=write, stderr=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_prompt_without_its_option_is_told_how(slipstream):
    code, out, err = slipstream("generate", "Hi there")
    assert (code, out) == (2, "")
    assert 'hint: a prompt is an option: slipstream generate --prompt "Hi there"' in err

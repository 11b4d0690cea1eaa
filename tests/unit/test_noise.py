"""What other programs do to ours: threads that wait asleep, and a note where they take the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from slipstream.cli.options import note_busy

SHOW = "import slipstream, os; print(os.environ['OMP_WAIT_POLICY'])"


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_wait_asleep_unless_the_user_says_otherwise(given: str | None) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if given is not None:
        env["OMP_WAIT_POLICY"] = given
    ran = subprocess.run([sys.executable, "-c", SHOW], env=env, capture_output=True, text=True)
    assert ran.stdout.strip() == (given or "PASSIVE")


@pytest.mark.parametrize(("share", "is_noted"), [(None, False), (0.02, False), (0.5, True)])
def test_a_busy_machine_is_noted(
    share: float | None, is_noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    note_busy(share)
    found = capsys.readouterr()
    assert found.out == ""
    assert ("other programs take 50% of the CPU" in found.err) == is_noted

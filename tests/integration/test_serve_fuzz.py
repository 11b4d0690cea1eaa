"""Some made-up requests; `tests/full` sends 5,000."""

from __future__ import annotations

from fuzzing import fuzz


def test_made_up_requests_never_break_the_server() -> None:
    seen = fuzz(120)
    assert seen[200] >= 10 and seen[400] >= 30, seen

"""The long fuzz: 5,000 requests made up from the OpenAPI document, valid and not."""

from __future__ import annotations

import pytest

from fuzzing import fuzz

pytestmark = pytest.mark.full


def test_5000_made_up_requests_never_break_the_server() -> None:
    seen = fuzz(5000)
    assert sum(seen.values()) >= 5000 and seen[200] >= 500 and seen[400] >= 1000, seen

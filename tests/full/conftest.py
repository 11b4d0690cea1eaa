"""The long checks run only when asked for by name: pytest -m full."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config, items):
    if "full" in (config.option.markexpr or ""):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="long: ask with -m full"))

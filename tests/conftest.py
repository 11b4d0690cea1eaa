"""Seeds, few threads, and the tiny targets that tests share."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from fakes import TableTarget

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


@pytest.fixture(autouse=True)
def seed() -> None:
    """The global generator starts the same in every test."""
    torch.manual_seed(0)


@pytest.fixture
def table() -> TableTarget:
    """A target that is a table over 97 ids."""
    return TableTarget()

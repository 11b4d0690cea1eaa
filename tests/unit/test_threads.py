"""Torch's threads rest while compiled passes run, and only then."""

from __future__ import annotations

import threading

import pytest
import torch

from fakes import tiny_model
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.target.hardware import num_threads, resting_threads
from slipstream.target.hf import HFTarget
from slipstream.target.library import library
from slipstream.verify.walk import walk


class Counting(NoDrafter):
    """Notes how many threads torch has, and how many a compiled pass would have."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, int]] = set()

    def propose(self, rows: object) -> object:
        self.seen.add((torch.get_num_threads(), num_threads()))
        return super().propose(rows)


@pytest.mark.parametrize(
    ("decoder", "rests"), [("fused", True), ("compiled", True), ("compiled", False)]
)
def test_a_step_has_the_threads_that_suit_decoder_and_drafter(decoder: str, rests: bool) -> None:
    if decoder == "compiled" and library().code is None:
        pytest.skip(library().detail)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        drafter = Counting()
        drafter.rests_threads = rests
        target = HFTarget(tiny_model("llama").bfloat16(), decoder=decoder)
        pieces = Engine(target, drafter, walk).stream([1, 2, 3], max_new_tokens=6)
        for _ in pieces:
            assert torch.get_num_threads() == 3, "whoever reads the pieces has all threads"
        assert drafter.seen == {(1, 3) if decoder == "compiled" and rests else (3, 3)}
        assert torch.get_num_threads() == num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_they_are_back_after_an_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="inside"), resting_threads(), resting_threads():
        assert torch.get_num_threads() == 1 and num_threads() == before
        raise ValueError("inside")
    assert torch.get_num_threads() == num_threads() == before


def test_a_thread_that_begins_meanwhile_has_all_of_them() -> None:
    """Also one whose first use of torch falls into another one's rest."""
    before, seen = torch.get_num_threads(), []

    def work() -> None:
        with resting_threads():
            seen.append((torch.get_num_threads(), num_threads()))
        seen.append((torch.get_num_threads(), num_threads()))

    with resting_threads():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [(1, before), (before, before)]

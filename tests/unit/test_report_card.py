"""A drafter's card is written whatever its batches measured."""

import json

from slipstream.report.card import write_card


def record(step, *accuracy, **more):
    return {"step": step, "tokens": 1000 * step, "seconds": step, "loss": 1.0,
            "prefix_accuracy": list(accuracy)} | more  # fmt: skip


def test_batches_may_draft_fewer_tokens_than_others(tmp_path):
    """DFlash trains on narrower blocks now and then; evaluations may look deeper than training."""
    records = [record(1, 0.5), record(2, 0.6, 0.3), record(3, 0.7)]
    records.append(record(4, 0.7, held_out_loss=2.0, held_out_prefix_accuracy=[0.6, 0.2, 0.1]))
    card = {"method": "dflash", "model": "tiny", "command": ["slipstream", "train"]}
    write_card(tmp_path, card, records)
    curves = (tmp_path / "curves.svg").read_text()
    for said in ("depth 1, training", "depth 2, training", "depth 3, held out"):
        assert said in curves
    assert "depth 3, training" not in curves
    whole = json.loads((tmp_path / "card.json").read_text())
    assert whole["steps"] == 4 and whole["held_out"]["held_out_loss"] == 2.0
    assert "A `dflash` drafter for `tiny`." in (tmp_path / "README.md").read_text()

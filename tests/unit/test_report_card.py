"""A drafter's card is written whatever its batches measured."""

import json

from slipstream.report.card import origin, write_card


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


def test_a_drafter_that_went_on_says_from_what(tmp_path):
    """Its own steps are not all that made it; those before add up over any number of trainings."""
    numbers = [(4, 4000, 4), (10, 10000, 10), (16, 16000, 16)]
    places = [tmp_path / name for name in ("first", "second", "third")]
    for index, (place, (steps, tokens, seconds)) in enumerate(zip(places, numbers, strict=True)):
        place.mkdir()
        card = {"method": "dflash", "model": "tiny", "command": ["slipstream", "train", str(index)]}
        if index:
            card["started_from"] = origin(places[index - 1])
        write_card(place, card, [record(steps, 0.5) | {"tokens": tokens, "seconds": seconds}])
    card = json.loads((places[2] / "card.json").read_text())
    assert card["steps"] == 16
    assert card["started_from"] == {
        "drafter": "second", "steps": 14, "tokens": 14000, "seconds": 14,
        "command": ["slipstream", "train", "1"],
    }  # fmt: skip
    said = (places[2] / "README.md").read_text()
    assert "`second` (14 steps, 14,000 packed tokens, 14 s), which `slipstream train 1` had" in said
    assert "Before" not in (places[0] / "README.md").read_text()


def test_a_drafter_without_a_card_of_ours_is_named_alone(tmp_path):
    assert origin(tmp_path / "theirs") == {"drafter": "theirs"}
    (tmp_path / "card.json").write_text('{"steps": "many", "tokens": 1, "seconds": 1}')
    assert origin(tmp_path) == {"drafter": tmp_path.name}
    (tmp_path / "card.json").write_text("[]")
    assert origin(tmp_path) == {"drafter": tmp_path.name}

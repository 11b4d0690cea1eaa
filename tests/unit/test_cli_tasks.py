"""What `bench`, `tune` and `verify` share: which of a user's prompts are asked."""

from __future__ import annotations

import json

from slipstream.cli.tasks import read_texts


def test_a_limit_spreads_over_a_users_file_and_says_so(tmp_path, capsys):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(10)), "utf-8")
    (rows,) = read_texts(None, path, 4).values()
    assert [(row, prompt.turns[0]) for row, prompt in rows] == [
        ("0", "p0"), ("2", "p2"), ("5", "p5"), ("7", "p7")
    ]  # fmt: skip
    assert "4 of 10 prompts" in capsys.readouterr().err
    (rows,) = read_texts(None, path, 10).values()
    assert [row for row, _ in rows] == [str(i) for i in range(10)]
    assert capsys.readouterr().err == ""

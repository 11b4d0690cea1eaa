"""`bench` from end to end: results, the gate against earlier ones, traces, and the page of both."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"say it again {i}"}) + "\n" for i in range(3)))
    return file


@pytest.fixture
def bench(slipstream, model, prompts):
    def run(*more):
        return slipstream(
            "bench", "--model", model, "--methods", "ngram", "--prompts", prompts, "--dtype",
            "float32", "--threads", 1, "--max-new-tokens", 16, *more,
            *(("--tolerance", 0.95) if "--against" in more else ()),
        )  # fmt: skip

    return run


def test_a_result_is_its_own_equal_and_the_gate_sees_a_fall(bench, tmp_path):
    old = tmp_path / "old.json"
    code, out, _ = bench("--output", old, "--json", "--temperatures", "0,1", "--rows", "1,2")
    value = json.loads(out)
    assert code == 0 and value == json.loads(old.read_text())
    cells = {(row["temperature"], row["num_rows"], row["method"]) for row in value["rows"]}
    assert len(cells) == len(value["rows"]) == 8
    assert all(row["different"] == 0 and row["lossless"] for row in value["rows"])
    ET.fromstring(old.with_suffix(".svg").read_text())

    code, out, _ = bench("--against", old, "--json", "--temperatures", "0,1")
    found = json.loads(out)["against"]
    assert code == 0 and not found["is_worse"] and len(found["missing"]) == 4
    assert all(c["ratio"] == 1 for c in found["changes"] if c["measure"] == "tau")

    for each in value["samples"]:
        if each["method"] == "ngram":
            each["num_target_passes"] /= 4
    old.write_text(json.dumps(value))
    code, out, _ = bench("--against", old)
    assert code == 1 and "worse beyond noise" in out and "was not measured this time" in out

    value["settings"]["seed"] = 5
    old.write_text(json.dumps(value))
    code, out, err = bench("--against", old)
    assert (code, out) == (2, "") and "--seed 5" in err and "measuring" not in err


def test_an_old_result_with_nothing_in_common_is_refused_before_measuring(bench, tmp_path):
    old = tmp_path / "old.json"
    assert bench("--output", old)[0] == 0
    code, out, err = bench("--against", old, "--temperatures", "1")
    assert (code, out) == (2, "") and "share no prompt" in err and "measuring" not in err


def test_what_was_measured_is_out_when_it_cannot_be_compared(bench, tmp_path, monkeypatch):
    from slipstream.bench import against
    from slipstream.errors import DataError

    def refuse(*_, **__):
        raise DataError("the two results share no prompt of any row")

    old = tmp_path / "old.json"
    assert bench("--output", old)[0] == 0
    monkeypatch.setattr(against, "compare", refuse)
    code, out, err = bench("--against", old, "--json")
    assert code == 2 and json.loads(out)["rows"] and "share no prompt" in err


def test_a_tolerance_of_nothing_is_refused(slipstream, model):
    code, out, err = slipstream("bench", "--model", model, "--tolerance", 0.05)
    assert (code, out) == (2, "") and "without --against" in err


def test_a_run_that_fails_later_keeps_the_rows_it_has(bench, tmp_path, monkeypatch):
    from slipstream.bench import runner

    made, count = runner.make_row, iter(range(99))

    def fail_later(*arguments, **options):
        if next(count) >= 2:
            raise OSError(28, "no space left")
        return made(*arguments, **options)

    monkeypatch.setattr(runner, "make_row", fail_later)
    output = tmp_path / "r.json"
    code, _, err = bench("--output", output, "--temperatures", "0,1")
    kept = json.loads(output.read_text())
    assert code == 2 and "no space left" in err
    assert kept["is_partial"] and [row["method"] for row in kept["rows"]] == ["none", "ngram"]
    assert "ngram" in kept["settings"]["methods"]


def test_result_and_traces_become_one_page(bench, slipstream, model, tmp_path):
    result, traces, page = (tmp_path / name for name in ("r.json", "t.json", "page.html"))
    code, _, _ = bench("--output", result, "--trace", traces)
    assert code == 0
    (trace,) = json.loads(traces.read_text())["traces"]
    assert trace["title"] == "ngram on p 0" and trace["prompt"] == "say it again 0"
    one = tmp_path / "g.json"
    code, _, _ = slipstream(
        "generate", "--model", model, "--method", "ngram", "--prompt", "a <b> a <b>",
        "--max-new-tokens", 8, "--trace", one,
    )  # fmt: skip
    assert code == 0 and json.loads(one.read_text())["traces"][0]["prompt"] == "a <b> a <b>"
    code, out, _ = slipstream("report", result, traces, one, "--output", page, "--json")
    assert (code, json.loads(out)) == (0, {"page": str(page)})
    text = page.read_text(encoding="utf-8")
    assert text.count('class="viewer card"') == 2 and "a &lt;b&gt; a &lt;b&gt;" in text
    code, _, err = slipstream("report", result, "--output", page)  # our own page is replaced
    assert code == 0 and "written" in err


def test_what_a_report_cannot_show_is_named(slipstream, tmp_path):
    other, page = tmp_path / "other.json", tmp_path / "page.html"
    other.write_text('{"kind": "shopping list"}')
    for path, says in ((other, "of no kind"), (tmp_path / "none.json", "none.json")):
        code, out, err = slipstream("report", path, "--output", page)
        assert (code, out) == (2, "") and says in err and "Traceback" not in err
    assert not page.exists()
    page.write_text("<p>mine</p>")
    code, _, err = slipstream("report", other, "--output", page)
    assert code == 2 and "exists" in err and page.read_text() == "<p>mine</p>"


def test_a_trace_is_not_written_over_another_file(slipstream, model, tmp_path):
    file = tmp_path / "t.json"
    file.write_text("mine")
    code, _, err = slipstream("generate", "--model", model, "--prompt", "a", "--method", "ngram",
                              "--trace", file)  # fmt: skip
    assert code == 2 and "exists" in err and file.read_text() == "mine"

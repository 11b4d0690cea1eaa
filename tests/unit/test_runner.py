"""The runner with fakes: order, pairing, clocks, interrupts, schema."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import pytest

from fakes import OracleDrafter, RandomDrafter, TableTarget
from slipstream.bench import results, runner, tasks
from slipstream.bench.runner import RunSettings
from slipstream.bench.specs import parse_spec, parse_specs
from slipstream.bench.tasks import BenchPrompt
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import DataError, OutputError, SettingError, UnknownNameError
from slipstream.verify.typical import typical
from slipstream.verify.walk import walk

PROMPTS = [BenchPrompt("t", f"p{i}", (i, i + 1, i + 2)) for i in range(5)]
SETTINGS = RunSettings(max_new_tokens=20)
ROW_KEYS = """
task method temperature num_rows num_prompts num_tokens tau tau_ci alpha reach tokens_per_second
decode_tokens_per_second speedup speedup_ci draft_seconds target_seconds other_seconds identical
ties different loops efficiency other_share
"""


@dataclass
class Spy:
    """An engine that writes down who was asked what, and can be interrupted."""

    name: str
    engine: Engine
    calls: list = field(default_factory=list)
    interrupt_at: int | None = None

    @property
    def target(self):
        return self.engine.target

    def describe(self):
        return self.engine.describe()

    def generate(self, prompts, **settings):
        self.calls.append((self.name, tuple(map(tuple, prompts)), settings))
        if self.interrupt_at == sum(name == self.name for name, *_ in self.calls):
            raise KeyboardInterrupt
        return self.engine.generate(prompts, **settings)


def spies(**interrupts):
    target, calls = TableTarget(), []
    known = [[*p.ids, *target.answer(p.ids, 30)] for p in PROMPTS]
    made = {
        "none": NoDrafter(),
        "oracle": OracleDrafter(known),
        "random": RandomDrafter(),
    }
    return {
        name: Spy(name, Engine(target, drafter, walk), calls, interrupts.get(name))
        for name, drafter in made.items()
    }, calls


def run(engines, settings=SETTINGS, **options):
    return runner.run(engines, {"t": PROMPTS}, settings, load_twin=pytest.fail, **options)


def test_a_lossy_rule_is_noted_above_temperature_zero():
    target = TableTarget()
    engines = {
        "none": Engine(target, NoDrafter(), walk),
        "medusa": Engine(
            target, RandomDrafter(), typical, settings={"verifier": "typical", "lossless": False}
        ),
    }
    settings = replace(SETTINGS, temperatures=(0.0, 1.0))
    report = run(engines, settings)
    assert [note for note in report.notes if note.startswith("medusa: verifier typical is lossy")]
    greedy_row, sampled_row = (row for row in report.rows if row.method == "medusa")
    assert sampled_row.identical is None and not sampled_row.lossless
    assert greedy_row.lossless and all(row.lossless for row in report.rows if row.method == "none")
    greedy = run(engines)
    assert not [note for note in greedy.notes if "lossy" in note]


def test_methods_are_interleaved_and_their_order_rotates():
    engines, calls = spies()
    run(engines)
    warm, timed = calls[:3], calls[3:]
    assert [name for name, *_ in warm] == ["none", "oracle", "random"]
    assert all(settings["max_new_tokens"] == 16 for *_, settings in warm)
    for i, prompt in enumerate(PROMPTS):
        turn = timed[3 * i : 3 * i + 3]
        assert {ids for _, ids, _ in turn} == {(prompt.ids,)}
        assert sorted(name for name, *_ in turn) == ["none", "oracle", "random"]
    assert [timed[3 * i][0] for i in range(4)] == ["none", "oracle", "random", "none"]
    assert {tuple(sorted(s.items())) for *_, s in timed} == {tuple(sorted(timed[0][2].items()))}


def test_rows_have_the_keys_and_the_counts():
    engines, _ = spies()
    report = run(engines).to_dict()
    asked = set(ROW_KEYS.split())
    assert report["schema"] == 1 and asked <= set(report["rows"][0])
    rows = {row["method"]: row for row in report["rows"]}
    assert rows["none"]["tau"] == 1.0 and rows["none"]["speedup"] == 1.0
    assert rows["oracle"]["tau"] > 3 and rows["random"]["tau"] < 2
    for row in rows.values():
        assert (row["identical"], row["ties"], row["different"]) == (5, 0, 0)
        assert row["num_prompts"] == 5 and row["num_tokens"] == 100
        for latency in (row["prefill_latency"], row["token_latency"]):
            assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"]
    assert len(report["samples"]) == 15
    environment = report["environment"]
    assert {"cpu", "num_threads", "versions", "dtype", "model", "is_busy"} <= set(environment)
    json.dumps(report, allow_nan=False)


def test_every_temperature_and_batch_size_has_its_rows():
    engines, calls = spies()
    seen = []
    settings = RunSettings(20, temperatures=(0.0, 0.8), rows=(1, 4), top_p=0.9)
    report = run(engines, settings, on_progress=lambda *step: seen.append(step))
    cells = [(r.temperature, r.num_rows, r.method) for r in report.rows]
    assert len(cells) == len(set(cells)) == 12
    assert all(row.identical == 5 for row in report.rows)  # keyed noise: equal when sampled too
    assert seen == [(i + 1, 14) for i in range(14)]
    assert max(len(ids) for _, ids, _ in calls) == 4


def test_an_interrupt_keeps_what_every_method_finished():
    engines, _ = spies(oracle=4)  # warm-up, then its third prompt
    report = run(engines)
    assert report.is_partial
    assert [row.num_prompts for row in report.rows] == [2, 2, 2]
    assert any("interrupted" in note for note in report.notes)
    engines, _ = spies(none=1)
    report = run(engines)
    assert report.is_partial and report.rows == []


def test_a_report_is_handed_out_as_it_grows():
    engines, _ = spies()
    grown = []
    settings = replace(SETTINGS, temperatures=(0.0, 0.8))
    run(engines, settings, on_rows=lambda report: grown.append(len(report.rows)))
    assert grown == [3, 6]
    engines, _ = spies(oracle=9)  # warm-up, five prompts, then the third of the second round
    grown.clear()
    run(engines, settings, on_rows=lambda report: grown.append(len(report.rows)))
    assert grown == [3]


def test_time_that_no_result_accounts_for_is_other():
    engines, _ = spies()
    slow = engines["random"]
    generate = slow.engine.generate

    def sleepy(prompts, **settings):
        import time

        time.sleep(0.05)
        return generate(prompts, **settings)

    slow.engine.generate = sleepy
    row = next(row for row in run(engines).rows if row.method == "random")
    assert row.other_seconds >= 0.25 and row.other_share > 0.5
    assert any("slower than plain" in note for note in run(engines).notes)


def test_answers_that_differ_are_counted_and_said():
    engines, _ = spies()
    wrong = Engine(TableTarget(seed=1), NoDrafter(), walk)
    engines["random"] = Spy("random", wrong, [])
    target = engines["none"].target
    report = runner.run(engines, {"t": PROMPTS}, SETTINGS, load_twin=lambda: target)
    row = next(row for row in report.rows if row.method == "random")
    assert row.different == 5 and row.speedup is None
    assert any("differ" in note for note in report.notes)


def test_the_hash_of_prompts_tells_template_modes_apart():  # B109
    other = [BenchPrompt("t", p.id, (*p.ids, 7)) for p in PROMPTS]
    assert tasks.ids_hash(PROMPTS) == tasks.ids_hash(list(PROMPTS)) != tasks.ids_hash(other)
    report = run(spies()[0])
    assert report.prompts == [{"task": "t", "num_prompts": 5, "ids_hash": tasks.ids_hash(PROMPTS)}]


def test_specs():
    assert parse_spec("eagle3").settings == {}
    found = parse_spec("eagle3+lookup:dynamic,budget=16,topk=6")
    assert found.method == "eagle3"
    assert found.settings == {"lookup": True, "tree": "dynamic", "budget": 16, "topk": 6}
    names = [s.name for s in parse_specs("ngram, eagle3:chain,depth=4 ,eagle3:budget=8,depth=3")]
    assert names == ["none", "ngram", "eagle3:chain,depth=4", "eagle3:budget=8,depth=3"]
    assert [s.name for s in parse_specs("none")] == ["none"]
    assert [s.name for s in parse_specs("ngram,none,eagle3")] == ["none", "ngram", "eagle3"]
    assert parse_specs("eagle3:drafter=zoo:eagle3")[1].settings == {"drafter": "zoo:eagle3"}


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("eagel3", UnknownNameError, "eagle3"),
        ("eagle3+look", UnknownNameError, "lookup"),
        ("eagle3:budgte=3", UnknownNameError, "budget"),
        ("eagle3:budget=0", SettingError, "1 or more"),
        ("eagle3:budget=many", SettingError, "whole number"),
        ("eagle3:budget=", SettingError, "METHOD"),
        ("ngram,ngram", SettingError, "twice"),
        ("", SettingError, "METHOD"),
    ],
)
def test_wrong_specs_say_what_is_known(text, error, says):
    with pytest.raises(error, match=says):
        parse_specs(text)


def test_families_of_spec_bench_are_tasks_by_their_own_name():
    for family in tasks.FAMILIES:
        rows = tasks.read_task(family)
        assert len(rows) == 80 and {(row.task, row.family) for row in rows} == {(family, family)}
    assert set(tasks.FAMILIES) | {"mt_bench", "gsm8k", "humaneval", "mbpp", "multilingual"} <= set(
        tasks.names()
    )
    assert {row.family[:2] for row in tasks.read_task("multilingual/zh")} == {"zh"}
    assert "```python" in tasks.read_task("humaneval", limit=1)[0].text


def test_a_machine_that_others_use_meanwhile_is_noticed(monkeypatch):
    from slipstream.bench import environment

    ticks = iter([(0, 0), (170, 200)])  # busy and all ticks: 1.7 of 2 seconds of CPU time
    own = iter([10.0, 10.5])
    monkeypatch.setattr(environment, "_cpu_ticks", lambda: next(ticks))
    monkeypatch.setattr(environment, "_own_seconds", lambda: next(own))
    monkeypatch.setattr(environment.os, "sysconf", lambda name: 100)
    assert environment.Watch().others() == pytest.approx((1.7 - 0.5) / 2)
    monkeypatch.setattr(environment, "_cpu_ticks", lambda: None)
    monkeypatch.setattr(environment, "_own_seconds", lambda: 0.0)
    assert environment.Watch().others() is None


def test_a_busy_stretch_is_said(monkeypatch):
    from slipstream.bench import environment

    monkeypatch.setattr(environment, "busy_share", lambda: 0.0)
    monkeypatch.setattr(environment.Watch, "others", lambda self: 0.4)
    report = run(spies()[0])
    assert report.environment["is_busy"] and report.environment["busy_share"] == 0.4
    assert any(note.startswith("other programs took 40% of the CPU") for note in report.notes)


def test_tasks_are_read_by_name_and_spread(tmp_path):
    rows = [{"id": i, "task": "ab"[i % 2], "turns": [f"q{i}", "more"]} for i in range(10)]
    (tmp_path / "gsm8k_test.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    read = tasks.read_task("gsm8k", limit=5, place=tmp_path)
    assert [row.text for row in read] == ["q0", "q2", "q4", "q6", "q8"]
    assert len(tasks.read_task("gsm8k_test", place=tmp_path)) == 10
    assert {row.family for row in tasks.read_task("gsm8k/b", place=tmp_path)} == {"b"}
    with pytest.raises(UnknownNameError, match="Known: gsm8k"):
        tasks.read_task("gsm9k", place=tmp_path)
    with pytest.raises(UnknownNameError, match="Known: a, b"):
        tasks.read_task("gsm8k/c", place=tmp_path)
    with pytest.raises(SettingError):
        tasks.read_task("gsm8k", limit=0, place=tmp_path)


def test_results_are_never_replaced_unasked(tmp_path):
    path = tmp_path / "r.json"
    results.check_output(path, overwrite=False)
    report = run(spies()[0])
    path.write_text(results.dumps(report.to_dict()), encoding="utf-8")
    assert results.read(path)["rows"][0]["method"] == "none"
    with pytest.raises(OutputError, match="exists"):
        results.check_output(path, overwrite=False)
    results.check_output(path, overwrite=True)
    with pytest.raises(OutputError, match="folder"):
        results.check_output(tmp_path / "no" / "r.json", overwrite=False)
    path.write_text('{"kind": "slipstream bench", "schema": 99}', encoding="utf-8")
    with pytest.raises(DataError, match="schema 99"):
        results.read(path)


def test_people_see_every_row_and_a_chart(capsys):
    from slipstream.cli.bench_tables import show
    from slipstream.report.figures import speedups

    engines, _ = spies()
    report = run(engines, RunSettings(20, temperatures=(0.0, 0.8)))
    show(report, None)
    shown = capsys.readouterr().out
    assert shown.count("\noracle") == 2 and "T=0.8" in shown and "5/5" in shown
    chart = speedups(report.to_dict())
    assert chart.startswith("<svg") and "oracle" in chart and "T=0.8" in chart


def test_progress_says_what_is_left_once_it_knows():
    from slipstream.cli.progress import Estimate

    clock = iter([100.0, 110.0, 300.0])
    estimate = Estimate(now=lambda: next(clock))
    assert estimate.left(1, 21) == ""
    assert estimate.left(2, 10) == "about 80 s left"
    assert estimate.left(3, 21) == "about 30 min left"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "--methods", "eagel3"], "eagle3"),
        (["bench", "--methods", "eagle3:budget=0"], "1 or more"),
        (["bench", "--methods", "ngram", "--tasks", "mt_bensh"], "mt_bench"),
        (["bench", "--methods", "ngram", "--temperature", "warm"], "numbers"),
        (["bench", "--methods", "ngram", "--temperature", "-1"], "0 or more"),
        (["bench", "--methods", "ngram", "--rows", "0"], "1 or more"),
        (["bench", "--methods", "ngram", "--output", "r.txt"], ".json"),
        (["bench", "--methods", "ngram", "--trace", "t.txt"], ".json"),
        (["bench", "--methods", "ngram", "--trace", "t.json", "--output", "t.json"], "another"),
        (["bench", "--methods", "ngram", "--against", "no_such.json"], "no_such.json"),
        (["bench", "--against", "no_such.json", "--tolerance", "1.5"], "[0, 1)"),
        (["bench", "--methods", "eagle3:drafter=/no/such/folder"], "/no/such/folder"),
        (["verify", "--method", "nogram"], "ngram"),
        (["verify", "--method", "ngram", "--rows", "0"], "1 or more"),
        (["verify", "--method", "ngram", "--verifier", "token", "--temperature", "1"], "walk"),
        (["verify", "--method", "ngram", "--prompts", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_wrong_input_is_one_error_before_anything_loads(arguments, says, capsys, monkeypatch):
    import typer

    from slipstream import assemble
    from slipstream.cli.main import app

    monkeypatch.setattr(assemble, "load", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(SystemExit) as stopped:
        typer.main.get_command(app).main(arguments, prog_name="slipstream")
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and says in printed.err and "Traceback" not in printed.err

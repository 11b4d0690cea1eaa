"""`slipstream train` on a tiny model: answers in, a drafter out that serves as it trained."""

import json
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise

import pytest
from drafters_on_disk import NUM_IDS

from chats import PLAIN, byte_tokenizer
from fakes import tiny_model
from slipstream.formats.layouts import EAGLE3

PROMPTS = ["ab", "the cat", "1+1=", "zzz", "hello there", "naïve 你好", "x y z", "0123"]


@pytest.fixture
def answers(tmp_path, slipstream, model):
    """The tiny model's own answers to a few prompts, made by `data regenerate`."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": str(n), "prompt": text} for n, text in enumerate(PROMPTS)]
    prompts.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    output = tmp_path / "answers.jsonl"
    code, _, err = slipstream(
        "data", "regenerate", "--model", model, "--prompts", prompts, "--output", output,
        "--max-new-tokens", 40, "--dtype", "float32", "--json",
    )  # fmt: skip
    assert code == 0, err
    return output


def arguments(answers, output, model, *more):
    return (
        "train", "--method", "eagle3", "--model", model, "--data", answers, "--output", output,
        "--steps", 6, "--save-every", 3, "--evaluate-every", 3, "--max-length", 96,
        "--num-unrolled", 2, "--held-out", 2, "--eval-prompts", 2, "--eval-tokens", 12,
        "--draft-vocab-size", 261, "--dtype", "float32", "--json", *more,
    )  # fmt: skip


def test_answers_to_drafter_to_decoding(slipstream, model, answers, tmp_path):
    run = tmp_path / "run"
    code, out, err = slipstream(*arguments(answers, run, model))
    assert code == 0, err
    done = json.loads(out)
    assert done["steps"] == 6 and done["tokens"] > 0 and done["tau"] >= 1
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert {"tokens", "loss", "prefix_accuracy"} <= lines[0].keys()
    assert {"tau", "alpha", "reach"} <= lines[2].keys()
    assert len(lines[2]["decoded_accuracy"]) == len(lines[2]["text_accuracy"]) == 2
    assert lines[2]["is_parity_kept"] and "warning" not in err
    assert (run / "best" / "card.json").is_file()
    card = json.loads((run / "drafter" / "card.json").read_text())
    assert card["step"] == 6 and card["config"]["steps"] == 6 and card["versions"]["torch"]
    assert card["tau"] == done["tau"] and card["held_out"]["chain_tau"] >= 1
    readme = (run / "drafter" / "README.md").read_text()
    assert "6 steps" in readme and str(tmp_path) not in readme + json.dumps(card["command"])
    assert (run / "drafter" / "curves.svg").read_text().startswith("<svg")
    code, out, err = slipstream(
        "generate", "--model", model, "--drafter", done["path"], "--prompt", "ab", "--dtype",
        "float32", "--max-new-tokens", 12, "--json",
    )  # fmt: skip
    assert code == 0, err
    drafted = json.loads(out)
    code, out, _ = slipstream(
        "generate", "--model", model, "--method", "none", "--prompt", "ab", "--dtype", "float32",
        "--max-new-tokens", 12, "--json",
    )  # fmt: skip
    assert json.loads(out)["outputs"][0]["token_ids"] == drafted["outputs"][0]["token_ids"]


def test_an_existing_output_is_refused_and_resume_goes_on(slipstream, model, answers, tmp_path):
    run = tmp_path / "run"
    assert slipstream(*arguments(answers, run, model))[0] == 0
    before = (run / "drafter" / "model.safetensors").read_bytes()
    code, _, err = slipstream(*arguments(answers, run, model))
    assert code == 2 and "Traceback" not in err and "--resume" in err
    code, out, _ = slipstream(*arguments(answers, run, model, "--resume"))
    assert code == 0 and json.loads(out)["steps"] == 6
    assert (run / "drafter" / "model.safetensors").read_bytes() == before
    code, _, err = slipstream(*arguments(answers, run, model, "--resume", "--seed", 5))
    assert code == 2 and "seed" in err


@pytest.mark.parametrize("more", [("--online",), ()])
def test_a_resumed_run_must_have_its_data(slipstream, model, answers, tmp_path, more):
    """With fewer texts the last ones, which are held out, would be some it was trained on."""
    run = tmp_path / "run"
    given = arguments(answers, run, model, "--limit", 7, *more)
    assert slipstream(*given)[0] == 0
    other = tmp_path / "other.jsonl"
    other.write_text("".join(answers.read_text().splitlines(keepends=True)[1:]))
    for change, says in (
        (("--limit", 5), "data limit 7 then, 5 now"),
        (("--loops", "keep"), "data loops cut then, keep now"),
        (("--max-prompt", 9), "data max_prompt None then, 9 now"),
        (("--last-turn-only",), "data last_turn_only False then, True now"),
    ):
        code, out, err = slipstream(*given, "--resume", *change)
        assert code == 2 and not out and says in " ".join(err.split())
    code, out, err = slipstream(*[other if x == answers else x for x in given], "--resume")
    assert code == 2 and not out and ("source_sha256" in err or "another file" in err)
    code, _, err = slipstream(*given, "--resume")
    assert code == 0, err
    record = json.loads((run / "run.json").read_text())
    assert record["data texts"] == 7
    old = {name: value for name, value in record.items() if not name.startswith("data ")}
    (run / "run.json").write_text(json.dumps(old))  # started before the data was remembered
    assert slipstream(*given, "--resume")[0] == 0
    assert json.loads((run / "run.json").read_text()) == record


def test_a_store_that_grew_is_not_the_runs_any_more(slipstream, model, answers, tmp_path):
    store, run = tmp_path / "store", tmp_path / "run"
    extract = ("data", "extract", "--data", answers, "--output", store, "--model", model)
    assert slipstream(*extract, "--limit", 6)[0] == 0
    assert slipstream(*arguments(store, run, model))[0] == 0
    assert slipstream(*extract, "--limit", 8, "--resume")[0] == 0
    code, _, err = slipstream(*arguments(store, run, model, "--resume"))
    assert code == 2 and "data texts 6 then, 8 now" in " ".join(err.split())


def test_resume_leaves_alone_what_is_not_its_own(slipstream, model, answers, tmp_path):
    """Hidden folders of others stay; a folder that holds no run is refused."""
    run = tmp_path / "run"
    foreign = run / ".my-notes"
    foreign.mkdir(parents=True)
    code, out, err = slipstream(*arguments(answers, run, model, "--resume"))
    assert code == 2 and not out and "holds no run" in " ".join(err.split()) and foreign.is_dir()
    foreign.rmdir()
    assert slipstream(*arguments(answers, run, model))[0] == 0
    left = [run / ".drafter-x1", run / ".evaluated-y2", run / "milestones" / ".step-00000003-z3"]
    for folder in (foreign, *left):
        folder.mkdir(parents=True)
    assert slipstream(*arguments(answers, run, model, "--resume"))[0] == 0
    assert foreign.is_dir() and not any(folder.exists() for folder in left)


def test_features_of_another_model_with_the_same_sizes_are_refused(
    slipstream, model, answers, tmp_path
):
    store, other = tmp_path / "store", tmp_path / "other"
    tokenizer = byte_tokenizer(PLAIN)
    tiny_model(
        seed=7, vocab_size=NUM_IDS, eos_token_id=tokenizer.eos_token_id,
        max_position_embeddings=256,
    ).save_pretrained(other)  # fmt: skip
    tokenizer.save_pretrained(other)
    answers.with_name("answers.jsonl.settings.json").unlink()  # it says whose answers they are
    assert slipstream(
        "data", "extract", "--data", answers, "--output", store, "--model", other
    )[0] == 0  # fmt: skip
    code, out, err = slipstream(*arguments(store, tmp_path / "run", model))
    said = " ".join(err.split())
    assert code == 2 and not out and "another embedding or head (100% of the values" in said
    assert not (tmp_path / "run").exists()
    for dtype in ("bfloat16", "float16"):  # rounded another way, and still the same model
        given = arguments(store, tmp_path / dtype, other, "--dtype", dtype)
        code, _, err = slipstream(*given)
        assert code == 0, err


def test_a_wrong_share_of_batches_does_not_bind_the_output(
    slipstream, model, answers, tmp_path, monkeypatch
):
    store = tmp_path / "store"
    assert slipstream(
        "data", "extract", "--data", answers, "--output", store, "--model", model
    )[0] == 0  # fmt: skip
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("slipstream.target.hf.load_target", None)
    code, out, err = slipstream(*arguments(store, tmp_path / "run", model, "--accumulate", 3))
    assert code == 2 and not out and "use --accumulate 2" in err
    assert not (tmp_path / "run").exists()


def test_a_given_drafter_decides_vocabulary_and_weights(
    slipstream, model, drafter, answers, tmp_path
):
    given = arguments(answers, tmp_path / "run", model, "--drafter", drafter)
    code, _, err = slipstream(*given)
    assert code == 2 and "draft-vocab-size" in err and not (tmp_path / "run").exists()
    given = [*given[: given.index("--draft-vocab-size")], *given[given.index("--dtype") :]]
    assert slipstream(*given)[0] == 0
    before, after = (
        EAGLE3.read(folder).vocabulary for folder in (drafter, tmp_path / "run" / "drafter")
    )
    assert before.target_ids.tolist() == after.target_ids.tolist()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("--method", "ngram"), "eagle3"),
        (("--method", "eagel3"), "eagle3"),
        (("--steps", 0), "steps"),
        (("--optimizer", "sgd"), "optimizer"),
        (("--draft-vocab-size", 3), "draft vocabulary"),
        (("--data", "nowhere.jsonl"), "nowhere"),
        (("--loops", "maybe"), "loops"),
        (("--drafter", "nowhere"), "nowhere"),
        (("--seed", 2**64), "seed"),
        (("--set", "heads=3"), "heads is 3, expected nothing: eagle3 does not use it"),
        (("--set", "decay"), "NAME=VALUE"),
        (("--set", "decay=2"), "decay is 2"),
        (("--set", "taps=1,9"), "tap is 9, expected 0..4"),
        (("--learning-rate", "inf"), "learning-rate is inf"),
        (("--learning-rate", "nan"), "learning-rate is nan, expected a finite number"),
    ],
)
def test_bad_input_is_one_clear_error(slipstream, model, answers, tmp_path, change, says):
    given = list(arguments(answers, tmp_path / "run", model))
    if change[0] in given:
        given[given.index(change[0]) + 1] = change[1]
    else:
        given += change
    code, out, err = slipstream(*given)
    assert code == 2 and not out and "Traceback" not in err and says in err


def test_a_mistake_in_the_data_does_not_bind_the_output(slipstream, model, answers, tmp_path):
    broken, run = tmp_path / "broken.jsonl", tmp_path / "run"
    broken.write_text(answers.read_text() + "{\n")
    code, _, err = slipstream(*arguments(broken, run, model))
    assert code == 2 and "line 9" in err
    assert not run.exists()


@pytest.mark.parametrize(
    "more", [("--limit", 3), ("--max-prompt", 9), ("--loops", "cut"), ("--last-turn-only",),
             ("--online",)],
)  # fmt: skip
def test_what_a_store_has_decided_is_refused(slipstream, model, tmp_path, more):
    store = tmp_path / "store"
    store.mkdir()
    code, out, err = slipstream(*arguments(store, tmp_path / "run", model, *more))
    assert code == 2 and not out and f"{more[0][2:]} is" in err and "feature store" in err


def test_features_of_another_template_or_mode_are_refused(slipstream, model, answers, tmp_path):
    store = tmp_path / "store"
    command = ("data", "extract", "--data", answers, "--output", store, "--model", model)
    assert slipstream(*command)[0] == 0
    index = json.loads((store / "index.json").read_text())
    for name, value, says in (
        ("template", "0123456789ab", "chat template 0123456789ab"),
        ("template_mode", {"enable_thinking": False}, "'enable_thinking': False"),
    ):
        changed = index | {"settings": index["settings"] | {name: value}}
        (store / "index.json").write_text(json.dumps(changed))
        code, out, err = slipstream(*arguments(store, tmp_path / "run", model))
        assert code == 2 and not out and says in err
    code, out, err = slipstream(*arguments(answers, tmp_path / "run", model, "--thinking", "on"))
    assert code == 2 and not out and "no such mode" in err
    code, out, err = slipstream(*arguments(answers, tmp_path / "run", model, "--thinking", "yes"))
    assert code == 2 and "thinking" in err


def test_features_as_it_trains_leave_no_shards(slipstream, model, answers, tmp_path):
    code, out, err = slipstream(*arguments(answers, tmp_path / "run", model, "--online"))
    assert code == 0, err
    assert json.loads(out)["steps"] == 6 and not (tmp_path / "run" / "features").exists()
    code, out, err = slipstream(*arguments(answers, tmp_path / "disk", model))
    last = [
        json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[-1])
        for run in ("run", "disk")
    ]
    assert last[0]["loss"] == pytest.approx(last[1]["loss"], rel=0.02)


@pytest.mark.parametrize(
    "name", ["readout.safetensors", "shard-00000.safetensors", "counts.safetensors", "index.json"]
)
def test_a_damaged_store_is_named(slipstream, model, answers, tmp_path, name):
    store = tmp_path / "store"
    code, _, err = slipstream(
        "data", "extract", "--data", answers, "--output", store, "--model", model
    )
    assert code == 0, err
    path = store / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    code, out, err = slipstream(*arguments(store, tmp_path / "run", model))
    assert code == 2 and not out and "Traceback" not in err
    assert name in err and "extract again" in err
    assert not (tmp_path / "run").exists()


def test_several_processes_need_features_made_before(
    slipstream, model, answers, tmp_path, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = slipstream(*arguments(answers, tmp_path / "run", model))
    assert code == 2 and not out and "slipstream data extract" in err


def test_a_tracker_that_is_not_installed_is_refused(slipstream, model, answers, tmp_path):
    for name in ("tensorboard", "wandb"):
        if find_spec(name) is None:
            given = arguments(answers, tmp_path / "run", model, "--tracker", name)
            code, out, err = slipstream(*given)
            assert code == 2 and not out and f"pip install {name}" in err


def test_a_warning_names_the_cause_when_decoding_and_training_part(
    slipstream, model, answers, tmp_path, monkeypatch
):
    """The objective is told a lie about its hits: decoding cannot agree with it."""
    from slipstream.parity import decoding

    honest = decoding.judged

    def lying(*arguments):
        loss = honest(*arguments)
        return replace(loss, prefix_hits=loss.prefix_count.expand_as(loss.prefix_hits).clone())

    monkeypatch.setattr(decoding, "judged", lying)
    code, _, err = slipstream(*arguments(answers, tmp_path / "run", model))
    said = " ".join(err.split())
    assert code == 0 and "warning: decoding accepts" in said and "files: eagle3" in said


def fine_tune(slipstream, model, answers, run, drafter, *more):
    given = arguments(answers, run, model, "--drafter", drafter)
    given = [*given[: given.index("--draft-vocab-size")], *given[given.index("--dtype") :]]
    return slipstream(*given, *more)


def test_fine_tuning_that_makes_it_worse_keeps_the_old_drafter(
    slipstream, model, answers, tmp_path
):
    """A good drafter, then steps so large that they ruin it."""
    first, second = tmp_path / "first", tmp_path / "second"
    longer = arguments(answers, first, model, "--learning-rate", 0.01)
    longer = [60 if before == "--steps" else x for before, x in pairwise(("", *longer))]
    assert slipstream(*longer)[0] == 0
    code, out, err = fine_tune(
        slipstream, model, answers, second, first / "drafter", "--learning-rate", 30
    )
    assert code == 1 and "the old drafter is kept" in " ".join(err.split())
    assert "worse" in json.loads(out)["kept_old"]
    kept, old = (p / "drafter" / "model.safetensors" for p in (second, first))
    assert kept.read_bytes() == old.read_bytes()
    assert (second / "worse" / "model.safetensors").read_bytes() != old.read_bytes()
    assert fine_tune(slipstream, model, answers, tmp_path / "third", first / "drafter")[0] == 0


def test_adapters_are_trained_resumed_and_written_plain(
    slipstream, model, answers, drafter, tmp_path
):
    pytest.importorskip("peft")
    run = tmp_path / "run"
    for more in ((), ("--resume",)):
        code, _, err = fine_tune(
            slipstream,
            model,
            answers,
            run,
            drafter,
            "--lora-rank",
            2,
            "--milestone-every",
            6,
            *more,
        )
        assert code == 0, err
    old, new = (EAGLE3.read(f).model.state_dict() for f in (drafter, run / "drafter"))
    assert old.keys() == new.keys() and bool((new["fc.weight"] != old["fc.weight"]).any())
    assert (run / "milestones" / "step-00000006" / "model.safetensors").is_file()


def blocks(slipstream, model, answers, run, method, *more):
    given = list(arguments(answers, run, model, *more))
    given[given.index("eagle3")] = method
    is_fresh = "--drafter" not in more
    for name in ("--num-unrolled", *(() if is_fresh else ("--draft-vocab-size",))):
        del given[given.index(name) : given.index(name) + 2]
    return slipstream(*given, *(("--set", "width=4", "--set", "num_layers=1") * is_fresh))


def test_adapters_and_a_fresh_path_head_resume(slipstream, model, answers, tmp_path):
    """The head is put on before the adapters, in a first session and in a later one."""
    pytest.importorskip("peft")
    first, run = tmp_path / "first", tmp_path / "run"
    code, _, err = blocks(slipstream, model, answers, first, "dflash", "--accumulate", 2)
    assert code == 0, err
    more = ("--drafter", first / "drafter", "--lora-rank", 2)
    for again in ((), ("--resume",)):
        code, _, err = blocks(slipstream, model, answers, run, "dspark", *more, *again)
        assert code in (0, 1) and "Traceback" not in err and "another network" not in err, err
        assert (run / "drafter" / "model.safetensors").is_file()
    code, _, err = blocks(
        slipstream, model, answers, tmp_path / "x", "dspark", *more, "--set", "only_path=true"
    )
    assert code == 2 and "expected nothing beside only_path" in " ".join(err.split())


def test_adapters_need_a_drafter_and_peft(slipstream, model, answers, drafter, tmp_path):
    code, _, err = slipstream(*arguments(answers, tmp_path / "run", model, "--lora-rank", 2))
    assert code == 2 and "--drafter" in err
    if find_spec("peft") is None:
        code, _, err = fine_tune(
            slipstream, model, answers, tmp_path / "run", drafter, "--lora-rank", 2
        )
        assert code == 2 and "pip install peft" in err

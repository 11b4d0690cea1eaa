"""The training loop: it learns, and a killed run resumes to the same bits."""

import contextlib
import gc
import json
import weakref

import pytest
import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState

from slipstream.cli.train import _own_device, _precision
from slipstream.data.store import Sample, Store, StoreIndex, StoreWriter
from slipstream.errors import CheckpointError, DataError, OutputError, SettingError
from slipstream.models.dflash import DFlash, DFlashConfig
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.target import hardware
from slipstream.train.checkpoint import load_state, save_state, states
from slipstream.train.config import TrainConfig
from slipstream.train.feed import Batches
from slipstream.train.initial import initialise
from slipstream.train.loop import measure, train
from slipstream.train.objectives.dflash import BlockDiffusion
from slipstream.train.objectives.ttt import TrainingTimeTest
from slipstream.train.optimize import make_optimizers

V, D, U = 31, 12, 19


@pytest.fixture
def store(tmp_path):
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(V, D, generator=generator)
    writer = StoreWriter(tmp_path / "store", StoreIndex("tiny", [0, 1, 2], D, V))
    writer.write_readout(Readout(embedding, torch.randn(V, D, generator=generator)))
    for shard in range(3):
        samples = []
        for _ in range(6):
            length = int(torch.randint(6, 20, (1,), generator=generator))
            tokens = torch.randint(0, V, (length,), generator=generator)
            samples.append(
                Sample(
                    tokens,
                    torch.arange(length) > 1,
                    torch.cat([tokens[1:], tokens[:1]]),
                    torch.randn(length, 3 * D, generator=generator),
                    torch.randn(length, D, generator=generator),
                )
            )
        writer.append(samples, source_rows=6 * (shard + 1))
    return Store(tmp_path / "store")


def setup(store, **changes):
    settings = {
        "steps": 12, "max_length": 32, "save_every": 3, "evaluate_every": 6,
        "learning_rate": 1e-2, "accumulate": 2,
    }  # fmt: skip
    config = TrainConfig(**settings | changes)
    vocabulary = DraftVocabulary.from_counts(store.supervised_counts(), U)
    model = Eagle3(Eagle3Config(D, 16, 4, 2, 6, V, U, (0, 1, 2), D))
    readout = store.readout()
    initialise(model, vocabulary, readout, layer=None, final_norm=None,
               generator=torch.Generator().manual_seed(1))  # fmt: skip
    objective = TrainingTimeTest(vocabulary, num_unrolled=2)
    return config, model, objective, readout, Batches(store, range(15), config)


class Killed(Exception):
    pass


def run(store, folder, *, kill_at=None, **changes):
    folder.mkdir(exist_ok=True)
    config, model, objective, readout, batches = setup(store, **changes)
    records = []

    def on_step(record):
        records.append(record)
        if record["step"] == kill_at:
            raise Killed

    with contextlib.suppress(Killed):
        train(model, objective, readout, batches, config, folder, on_step=on_step)
    return model, records


@pytest.mark.parametrize("kill_at", [1, 3, 4, 8, 11])
def test_a_resumed_run_ends_in_the_same_bits(store, tmp_path, kill_at):
    whole, _ = run(store, tmp_path / "whole")
    run(store, tmp_path / "cut", kill_at=kill_at)
    resumed, _ = run(store, tmp_path / "cut")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    lines = [
        [json.loads(line) for line in (tmp_path / f / "metrics.jsonl").read_text().splitlines()]
        for f in ("whole", "cut")
    ]
    for first, second in zip(*lines, strict=True):
        for key in ("step", "tokens", "loss", "prefix_accuracy", "learning_rate"):
            assert first[key] == second[key]
    assert [r["step"] for r in lines[0]] == list(range(1, 13))


def test_a_torn_metrics_line_is_dropped_on_resume(store, tmp_path):
    run(store, tmp_path / "cut", kill_at=7)
    path = tmp_path / "cut" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 8, "lo')
    run(store, tmp_path / "cut")
    assert [json.loads(x)["step"] for x in path.read_text().splitlines()] == list(range(1, 13))


def test_a_torn_state_is_refused_and_the_one_before_is_kept(store, tmp_path):
    run(store, tmp_path / "run", kill_at=7)
    newest = states(tmp_path / "run")[-1]
    newest.write_bytes(newest.read_bytes()[:-50])
    _, model, *_ = setup(store)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_state(newest, model, [])
    assert len(states(tmp_path / "run")) == 2


def test_a_state_of_another_network_is_refused(store, tmp_path):
    config, model, *_ = setup(store)
    path = save_state(tmp_path, 1, model, make_optimizers(model, config), {})
    other = Eagle3(Eagle3Config(D, 20, 4, 2, 6, V, U, (0, 1, 2), D))
    with pytest.raises(CheckpointError, match="another network"):
        load_state(path, other, [])


def test_a_state_of_another_optimizer_is_refused(store, tmp_path):
    """Such as of a run whose frozen weights were not yet left out of it."""
    config, model, *_ = setup(store)
    optimizers = make_optimizers(model, config)
    sum(p.sum() for p in model.parameters()).backward()
    optimizers[0].step()
    path = save_state(tmp_path, 1, model, optimizers, {})
    load_state(path, model, make_optimizers(model, config))
    model.fc.requires_grad_(False)
    with pytest.raises(CheckpointError, match="another optimizer"):
        load_state(path, model, make_optimizers(model, config))


def test_training_lowers_the_held_out_measure_it_reports(store, tmp_path):
    config, model, objective, readout, batches = setup(store, steps=60)
    held = [batches(0)]
    before = measure(model, objective, readout, held)
    done = train(model, objective, readout, batches, config, tmp_path, held_out=held)
    assert done.last["held_out_loss"] < before["held_out_loss"] - 0.3
    assert done.last["chain_tau"] > before["chain_tau"]
    assert done.steps == 60 and done.tokens > 0


def test_muon_and_adamw_both_resume(store, tmp_path):
    whole, _ = run(store, tmp_path / "whole", optimizer="muon")
    run(store, tmp_path / "cut", kill_at=5, optimizer="muon")
    resumed, _ = run(store, tmp_path / "cut", optimizer="muon")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(),
                                                 strict=True))  # fmt: skip


def test_the_store_gives_back_what_was_written(store):
    assert len(store) == 18 and sum(store.lengths) == store.index.num_tokens
    one = store[7]
    assert len(one) == store.lengths[7]
    assert torch.equal(one.best[:-1], one.tokens[1:])
    assert int(store.supervised_counts([7]).sum()) == int(one.loss_mask.sum())


def test_a_folder_that_is_no_store_is_refused(store, tmp_path):
    with pytest.raises(DataError, match="no index"):
        Store(tmp_path)
    (store.folder / "shard-00001.safetensors").unlink()
    with pytest.raises(DataError, match="misses shard-00001"):
        Store(store.folder)


def test_a_disk_that_is_too_small_is_refused_before_the_work(tmp_path):
    from slipstream.data.store import check_room

    with pytest.raises(OutputError, match="GB are free"):
        check_room(tmp_path, 10**18)


def test_no_batch_is_kept(store):
    """Memory is flat in the number of texts: what a batch was made of goes with it."""
    config, _, _, _, batches = setup(store)
    seen = []
    for number in range(12):
        batch = batches(number)
        seen += [weakref.ref(batch.features), weakref.ref(batch.last_hidden)]
    del batch
    gc.collect()
    assert not [ref for ref in seen if ref() is not None] and config.rows == 1


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_less_memory_and_autocast_train_to_the_same(store, tmp_path, precision):
    """Recomputed activations change nothing; bfloat16 changes little."""
    AcceleratorState._reset_state(True)
    try:
        whole, first = run(store, tmp_path / "whole", precision=precision)
        again, second = run(store, tmp_path / "again", precision=precision, recompute=True)
        assert [r["loss"] for r in first] == [r["loss"] for r in second]
        assert all(map(torch.equal, whole.state_dict().values(), again.state_dict().values()))
    finally:
        AcceleratorState._reset_state(True)
    _, exact = run(store, tmp_path / "exact")
    assert first[-1]["loss"] == pytest.approx(exact[-1]["loss"], rel=0.05)
    assert (first[-1]["loss"] == exact[-1]["loss"]) == (precision == "no")


def test_accumulated_batches_are_one_step(store, tmp_path):
    """The recorded loss is the mean of the step's batches."""
    _, model, objective, readout, batches = setup(store, steps=1, learning_rate=1e-9)
    expected = (
        sum(float(objective(model, batches(i), readout).total.detach()) for i in range(2)) / 2
    )
    _, (record,) = run(store, tmp_path / "run", steps=1, learning_rate=1e-9)
    assert record["loss"] == pytest.approx(expected, rel=1e-6)


def test_blocks_of_several_widths_are_one_step(store, tmp_path):
    """Hits of narrow blocks are not added to those of whole ones, nor spread over them."""
    config, _, _, readout, batches = setup(store, steps=8, accumulate=3)
    model = DFlash(DFlashConfig(D, 16, 4, 2, 6, 1, V, V, (0, 1, 2), D, 4, 30))
    objective = BlockDiffusion(DraftVocabulary.full(V), narrow=0.6, density=3.0)
    seen, records = [], []

    def spy(*given):
        seen.append(objective(*given))
        return seen[-1]

    train(model, spy, readout, batches, config, tmp_path, on_step=records.append)
    counts = [int(loss.prefix_count) for loss in seen]
    assert 0 in counts and any(counts)
    for number, record in enumerate(records):
        micros = seen[3 * number : 3 * number + 3]
        count = sum(float(loss.prefix_count) for loss in micros)
        hits = sum(loss.prefix_hits for loss in micros)
        shares = (hits / count).tolist() if count else []
        assert record["prefix_accuracy"] == pytest.approx(shares, abs=1e-5)


def test_best_and_milestones_are_told(store, tmp_path):
    config, model, objective, readout, batches = setup(store, steps=12, milestone_every=5)
    told = []
    train(model, objective, readout, batches, config, tmp_path, held_out=[batches(0)],
          on_save=lambda kind, step: told.append((kind, step)))  # fmt: skip
    assert [t for t in told if t[0] == "last"] == [("last", s) for s in (3, 6, 9, 12)]
    assert [t for t in told if t[0] == "milestone"] == [("milestone", 5), ("milestone", 10)]
    assert ("best", 6) in told and all(step in (6, 12) for kind, step in told if kind == "best")


def test_launchers_that_shard_are_refused(store, tmp_path, monkeypatch):
    """Sharding is ours alone, and takes several processes."""
    config, model, objective, readout, batches = setup(store)
    with pytest.raises(SettingError, match="shard is on, expected off in a single process"):
        alone = config.model_copy(update={"shard": True})
        train(model, objective, readout, batches, alone, tmp_path)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    with pytest.raises(SettingError, match="FSDP, expected plain data parallel, on which --shard"):
        train(model, objective, readout, batches, config, tmp_path)


@pytest.mark.parametrize(
    ("has_tiles", "flags", "expected"),
    [
        (True, {"avx512_bf16", "amx_bf16"}, "bf16"),
        (False, {"avx512_bf16"}, "no"),
        (False, {"avx512_bf16", hardware.AMD}, "bf16"),
        (False, {hardware.AMD}, "no"),
    ],
)
def test_auto_precision_is_what_the_processor_is_faster_in(monkeypatch, has_tiles, flags, expected):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles, raising=False)
    monkeypatch.setattr(hardware, "processor_flags", lambda: flags)
    assert _precision("auto", "cpu") == expected
    assert _precision("bf16", "cpu") == "bf16" and _precision("no", "cpu") == "no"


def test_each_of_several_processes_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(hardware, "pick_device", torch.device)
    assert _own_device("cuda:1") == "cuda:1"  # alone, it has the one that was named
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert _own_device("cuda") == "cuda:3" and _own_device("cpu") == "cpu"
    with pytest.raises(SettingError, match="device is cuda:1, expected cuda without a number"):
        _own_device("cuda:1")

"""Features on disk in 16 and 8 bits, and features as training goes: the same samples."""

import json
from types import SimpleNamespace

import pytest
import torch

from chats import PLAIN, byte_tokenizer
from elsewhere import Elsewhere
from fakes import tiny_target
from slipstream.data.eightbit import quantise, restore
from slipstream.data.extract import Estimate, extract_shards, features_of, plan_texts
from slipstream.data.merge import merge
from slipstream.data.online import OnlineStore
from slipstream.data.store import Sample, Store, bytes_per_token
from slipstream.errors import DataError, OutputError, SettingError
from slipstream.models.readout import Readout
from slipstream.train.config import TrainConfig
from slipstream.train.feed import Batches

TURNS = [("hi", "hello you"), ("more", "a second answer, longer"), ("end", "bye")]


@pytest.fixture(scope="module")
def target():
    inner = byte_tokenizer(PLAIN)
    return tiny_target(vocab_size=261, tokenizer=inner, eos_token_id=inner.eos_token_id)


@pytest.fixture
def data(tmp_path):
    """A chat of three turns, two of one, and one that says the same for ever."""
    said = [TURNS, TURNS[:1], TURNS[1:2], [("loop", "again " * 12)]]
    rows = [
        {
            "messages": [
                {"role": role, "content": text}
                for turn in turns
                for role, text in zip(("user", "assistant"), turn, strict=True)
            ]
        }
        for turns in said
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def extract(target, data, folder, **options):
    settings = {"name": "tiny", "tokenizer": target.tokenizer, "taps": (1, 3)} | options
    readout = Readout(target.embedding(), target.head())
    extract_shards(target, readout, data, folder, **settings)
    return Store(folder)


def online(target, data, **options):
    readout = Readout(target.embedding(), target.head())
    planned = plan_texts(data, target.tokenizer, **options)
    return OnlineStore(target, readout, planned, name="tiny", taps=(1, 3))


def test_online_samples_are_those_of_the_shards(target, data, tmp_path):
    store, live = extract(target, data, tmp_path / "store"), online(target, data)
    assert len(live) == len(store) == 4 and live.lengths == store.lengths
    assert live.index.source_hash == store.index.source_hash
    assert live.index.counts == store.index.counts and live.index.counts["loops"] == 1
    for ours, theirs in zip(live.take(range(4)), store.take(range(4)), strict=True):
        for name in ("tokens", "loss_mask", "best"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
        for name in ("features", "last_hidden"):
            ours_, theirs_ = (getattr(x, name).float() for x in (ours, theirs))
            assert torch.allclose(ours_, theirs_, rtol=0.02, atol=0.02)
    assert torch.equal(live.readout().embedding, store.readout().embedding)
    assert torch.equal(live.vocabulary_counts([3]), store.vocabulary_counts([3]))
    config = TrainConfig(max_length=64, rows=2)
    first, second = (Batches(s, range(3), config)(1) for s in (live, store))
    assert torch.equal(first.tokens, second.tokens) and first.number == 1


def test_features_come_home_from_another_device(target, data):
    """The target's values on its device, ids on the processor's."""
    texts = [text for text in plan_texts(data, target.tokenizer).texts if text]
    readout = Readout(target.embedding().clone(), target.head().clone())
    said = []

    def extract(*given):
        said.append(target.extract(*given))
        return said[-1]

    here = features_of(SimpleNamespace(extract=extract), readout, texts, (1, 3))
    replayed = iter(said)
    with Elsewhere() as device:
        device.mark(readout)
        target_there = SimpleNamespace(extract=lambda *_: device.mark(next(replayed)))
        there = features_of(target_there, readout, texts, (1, 3))
        for one, other in zip(here, there, strict=True):
            for name in Sample.__slots__:
                assert not device.has(getattr(other, name))
                assert torch.equal(getattr(one, name), getattr(other, name))


def test_eight_bits_take_half_the_disk_and_keep_the_values(target, data, tmp_path):
    whole = extract(target, data, tmp_path / "whole")
    half = extract(target, data, tmp_path / "half", bits=8)
    sizes = [sum(p.stat().st_size for p in store.folder.glob("shard-*")) for store in (whole, half)]
    assert sizes[1] < 0.65 * sizes[0]
    for ours, theirs in zip(half.take(range(4)), whole.take(range(4)), strict=True):
        error = (ours.features.float() - theirs.features.float()).norm()
        assert float(error / theirs.features.float().norm()) < 0.01
        assert torch.equal(ours.tokens, theirs.tokens)
    some = Store(half.folder, taps=(3,))[0]
    assert torch.equal(some.features, half[0].features[:, target.spec.hidden_size :])
    with pytest.raises(DataError, match="bits 8, this run has 16"):
        extract(target, data, tmp_path / "half", resume=True)


def test_one_loud_channel_spoils_its_group_only():
    values = torch.randn(3, 128)
    values[:, 5] = 900.0
    packed, scales = quantise(values, 128)
    back = restore(packed, scales).float()
    assert packed.dtype == torch.int8 and scales.shape == (3, 2)
    assert float((back - values)[:, 64:].abs().max()) < 0.03
    assert torch.equal(restore(*quantise(torch.zeros(2, 64), 64)), torch.zeros(2, 64).bfloat16())


def test_the_estimate_is_exact_and_comes_before_the_work(target, data, tmp_path):
    plans = []

    def keep(plan):
        assert not list((tmp_path / "store").glob("shard-*"))
        plans.append(plan)

    store = extract(target, data, tmp_path / "store", on_estimate=keep)
    (plan,) = plans
    assert isinstance(plan, Estimate) and plan.seconds > 0
    assert (plan.rows, plan.tokens) == (len(store), sum(store.lengths))
    stored = 0
    for path in store.folder.glob("shard-*"):
        header = int.from_bytes(path.read_bytes()[:8], "little")
        stored += path.stat().st_size - 8 - header
    assert plan.bytes == stored == plan.tokens * bytes_per_token(2, target.spec.hidden_size)


def test_a_chat_teaches_every_answer_or_the_last(target, data):
    every, last = online(target, data), online(target, data, last_turn_only=True)

    def learned(store, item):
        sample = store[item]
        return target.tokenizer.decode(sample.tokens[sample.loss_mask].tolist())

    assert learned(every, 0) == "".join(answer for _, answer in TURNS)
    assert learned(last, 0) == "bye"
    assert learned(every, 1) == learned(last, 1) == "hello you"


def test_a_part_that_was_killed_is_not_merged(target, data, tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.data.extract.ROWS_PER_SHARD", 1)
    parts = [tmp_path / f"part-{i}" for i in range(2)]
    extract(target, data, parts[0], shard="0/2")

    def killed(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract(target, data, parts[1], shard="1/2", on_progress=killed)
    with pytest.raises(DataError, match=r"part-1 is not whole: 1 of 2 rows are done"):
        merge(parts, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    extract(target, data, parts[1], shard="1/2", resume=True)
    assert merge(parts, tmp_path / "merged").num_rows == 4
    index = json.loads((parts[1] / "index.json").read_text())
    del index["planned_rows"]  # as older stores, which cannot tell
    (parts[1] / "index.json").write_text(json.dumps(index))
    assert merge(parts, tmp_path / "again").num_rows == 4


def write_tokens(path, *rows, **settings):
    path.write_text("\n".join(map(json.dumps, rows)))
    if settings:
        path.with_name(f"{path.name}.settings.json").write_text(json.dumps(settings))
    return path


def test_tokens_of_another_model_are_refused_before_anything_is_written(target, tmp_path):
    """Ids that the model has not, and ids whose origin is told beside them."""
    row = {"prompt_ids": [70, 71], "response_ids": [72, 257]}
    foreign = write_tokens(tmp_path / "a.jsonl", row, row | {"response_ids": [9000]})
    with pytest.raises(DataError, match="token id 9000 is outside the model's vocabulary of 261"):
        extract(target, foreign, tmp_path / "store")
    with pytest.raises(DataError, match="token id 9000"):
        online(target, foreign)
    assert not (tmp_path / "store").exists()
    ours = {"model": "somewhere/Tiny", "template": target.tokenizer.fingerprint,
            "template_mode": {}}  # fmt: skip
    assert len(extract(target, write_tokens(foreign, row, **ours), tmp_path / "store")) == 1
    for changes, says in (
        ({"model": "else/big"}, "model else/big, this run has tiny"),
        ({"template": "0123"}, "template 0123, this run has"),
        ({"template_mode": {"enable_thinking": False}}, "template mode {'enable_thinking': False}"),
    ):
        data = write_tokens(tmp_path / "b.jsonl", row, **ours | changes)
        with pytest.raises(DataError, match=says):
            extract(target, data, tmp_path / "other")
    chats = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    data = write_tokens(tmp_path / "c.jsonl", chats, **ours | {"template": "0123"})
    assert len(extract(target, data, tmp_path / "chats")) == 1  # tokenised here and now


def test_tokenised_text_is_not_taken_for_the_targets_choices(target, tmp_path):
    row = {"prompt_ids": [70, 71], "response_ids": [72, 73, 257]}
    rows = row, row | {"retokenised": True}, row | {"temperature": 1.0}
    emitted, *others = extract(target, write_tokens(tmp_path / "a", *rows), tmp_path / "s").take(
        range(3)
    )
    assert emitted.best[1:-1].tolist() == row["response_ids"]
    assert all(torch.equal(other.best, others[0].best) for other in others)
    assert not torch.equal(emitted.best, others[0].best)


def test_bits_are_checked():
    from slipstream.cli.data import extract as command

    with pytest.raises(SettingError, match="bits is 4, expected 8 or 16"):
        command(data=None, output=None, bits=4)


def test_shards_of_several_machines_become_one_store(target, data, tmp_path):
    whole = extract(target, data, tmp_path / "whole")
    parts = [tmp_path / f"part-{i}" for i in range(3)]
    for i, part in enumerate(parts):
        extract(target, data, part, shard=f"{i}/3")
    index = merge(parts, tmp_path / "merged")
    store = Store(tmp_path / "merged")
    assert index.num_rows == len(store) == len(whole) == 4
    assert store.index.source_rows == whole.index.source_rows
    assert store.index.counts == whole.index.counts
    ours, theirs = (sorted(s[i].tokens.tolist() for i in range(len(s))) for s in (store, whole))
    assert ours == theirs
    assert torch.equal(store.vocabulary_counts([]), whole.vocabulary_counts([]))
    assert torch.equal(store.readout().embedding, whole.readout().embedding)
    for some, found in ((parts[:2], "0/3, 1/3"), (parts[1:], "1/3, 2/3")):
        with pytest.raises(DataError, match=f"found shards {found}, expected all of 0/3 to 2/3"):
            merge(some, tmp_path / "some")
    with pytest.raises(DataError, match="given twice"):
        merge([parts[0], parts[0]], tmp_path / "twice")
    other = tmp_path / "other"
    extract(target, data, other, shard="1/3", loops="keep")
    with pytest.raises(DataError, match="loops"):
        merge([parts[0], other], tmp_path / "mixed")
    with pytest.raises(OutputError, match="not empty"):
        merge(parts, whole.folder)

"""A tiny training run in processes of its own: to be killed, or shared between two.

python training_processes.py run STORE FOLDER {}    one run, or a share of one under torchrun
python training_processes.py kill STORE FOLDER {}   the same, killed ten times on its way

The last argument holds changes of the settings, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from slipstream.data.store import Sample, Store, StoreIndex, StoreWriter
from slipstream.formats.checkpoint import DFlashCheckpoint, Eagle3Checkpoint
from slipstream.formats.layouts import DFLASH, EAGLE3
from slipstream.models.dflash import DFlash, DFlashConfig
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.train.config import TrainConfig
from slipstream.train.feed import Batches
from slipstream.train.initial import initialise
from slipstream.train.loop import train
from slipstream.train.objectives.ttt import TrainingTimeTest
from slipstream.train.recipes.dflash import DSparkSettings, path_objective

V, D, U = 31, 12, 19
KILLS = 10


def make_store(folder: Path) -> Store:
    """Eighteen random texts in three shards."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(V, D, generator=generator)
    writer = StoreWriter(folder, StoreIndex("tiny", [0, 1, 2], D, V))
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
    return Store(folder)


def run(store: Store, folder: Path, **changes: object) -> None:
    """Train to the end, from wherever the folder's states are."""
    settings = {
        "steps": 24, "max_length": 32, "save_every": 2, "evaluate_every": 5,
        "learning_rate": 1e-2, "accumulate": 2, "milestone_every": 10,
    }  # fmt: skip
    config = TrainConfig(**settings | changes)
    readout = store.readout()
    layout, checkpoint, objective = make(store, readout, config.method)
    batches = Batches(store, range(15), config)

    def save(kind: str, step: int) -> None:
        layout.write(checkpoint, folder / kind, card={"step": step}, overwrite=True)

    folder.mkdir(exist_ok=True)
    train(
        checkpoint.model,
        objective,
        readout,
        batches,
        config,
        folder,
        held_out=[batches(0)],
        on_save=save,
    )


def make(store: Store, readout: Readout, method: str) -> tuple[object, object, object]:
    """Files, first weights and objective: an EAGLE-3, or a path head on a block drafter."""
    vocabulary = DraftVocabulary.from_counts(store.supervised_counts(), U)
    generator = torch.Generator().manual_seed(1)
    if method == "eagle3":
        model = Eagle3(Eagle3Config(D, 16, 4, 2, 6, V, U, (0, 1, 2), D))
        initialise(model, vocabulary, readout, layer=None, final_norm=None, generator=generator)
        objective = TrainingTimeTest(vocabulary, num_unrolled=2)
        return EAGLE3, Eagle3Checkpoint(model, vocabulary), objective
    network = DFlash(DFlashConfig(D, 16, 4, 2, 6, 1, V, U, (0, 1, 2), D, 4, V - 1))
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.3, generator=generator)
    checkpoint = DFlashCheckpoint(network, vocabulary)
    settings = DSparkSettings(only_path=True, path_rank=6, density=4.0)
    return DFLASH, checkpoint, path_objective(checkpoint, settings)


def kill(store: Store, folder: Path) -> int:
    """The same run, killed at random moments; how many runs came to their end."""
    whole = folder / "whole"
    whole.mkdir(parents=True)
    started = time.monotonic()
    _wait(_fork(store, whole))
    seconds = time.monotonic() - started
    chooser, kills, ends = random.Random(0), 0, 0
    while kills < KILLS or not ends:
        cut = folder / f"cut-{ends}"
        child = _fork(store, cut)
        if kills < KILLS:
            time.sleep(chooser.uniform(0.1, 0.6) * seconds)
            os.kill(child, signal.SIGKILL)
        status = _wait(child)
        kills += status == -signal.SIGKILL
        ends += status == 0
        assert status in (0, -signal.SIGKILL), f"a resumed run failed with {status}"
    return ends


def _fork(store: Store, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    run(store, folder)
    os._exit(0)


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, given, place = sys.argv[1], Store(Path(sys.argv[2])), Path(sys.argv[3])
    if what == "kill":
        shutil.rmtree(place, ignore_errors=True)
        sys.stdout.write(str(kill(given, place)))
    else:
        run(given, place, **json.loads(sys.argv[4]))

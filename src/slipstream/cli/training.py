"""A training run from a target's name to a drafter's folder: what `slipstream train` does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.data.batches import Batch, collate
from slipstream.data.extract import extract_shards
from slipstream.data.store import Store
from slipstream.drafters.eagle import EagleDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import CheckpointError, DataError
from slipstream.formats import eagle3
from slipstream.formats.eagle3 import Eagle3Checkpoint
from slipstream.models.eagle3 import Eagle3, Eagle3Config, default_taps
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.report.card import read_metrics, write_card
from slipstream.target.hf import load_target
from slipstream.train.checkpoint import provenance, states
from slipstream.train.config import TrainConfig
from slipstream.train.initial import initialise
from slipstream.train.loop import Batches, train
from slipstream.train.objectives.ttt import TrainingTimeTest

DRAFTER = "drafter"  # folder of the newest drafter within a run
FEATURES = "features"
HELD_OUT_TOKENS = 32_768  # at most, so that evaluations stay short


class Run:
    """One run.

    Args:
        config: settings.
        folder: everything is written here.
        model: the target's name.
        drafter: folder of a drafter to start from, or None.
        target_options: dtype, device, threads.
        say: prints a line for people.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        *,
        model: str,
        drafter: str | None,
        target_options: dict[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self.config, self.folder, self.say = config, folder, say
        self.start_from = drafter
        self.target = load_target(model, **target_options)
        self.readout = Readout(self.target.embedding(), self.target.head())
        self.taps = default_taps(self.target.spec.num_layers)
        self.record = {"model": model, "drafter": drafter} | config.model_dump()
        self._check_record()

    def extract(
        self,
        data: Path,
        *,
        limit: int | None,
        max_prompt: int | None,
        loops: str,
        resume: bool,
        on_progress: Callable[[int, int, int, float], None],
    ) -> None:
        """Open a store, or make one of a data file inside the run's folder."""
        if not data.is_dir():
            done = extract_shards(
                self.target,
                self.readout,
                data,
                self.folder / FEATURES,
                name=self.target.spec.name,
                tokenizer=self.target.tokenizer,
                taps=self.taps,
                max_length=self.config.max_length,
                max_prompt=max_prompt,
                limit=limit,
                loops=loops,
                resume=resume,
                on_progress=on_progress,
            )
            self.say(
                f"features: {done.rows} texts, {done.tokens:,} tokens, {done.bytes / 1e9:.2f} GB"
                f"; {_counted(done.counts)}"
            )
            data = self.folder / FEATURES
        self.store = Store(data)
        self._check_store(data)
        count = min(self.config.held_out, len(self.store) // 2)
        self.items = range(len(self.store) - count)
        self.held_out = range(len(self.store) - count, len(self.store))

    def train(
        self,
        *,
        num_prompts: int,
        num_tokens: int,
        on_step: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        """Train, evaluating by decoding; returns what the command prints."""
        checkpoint = self._first()
        self._remember()
        config = self.config
        objective = TrainingTimeTest(
            checkpoint.vocabulary, num_unrolled=config.num_unrolled, decay=config.decay
        )
        readout = self.store.readout()
        batches = Batches(self.store, self.items, config)
        self.say(
            f"{len(self.items)} texts, {sum(batches.lengths):,} tokens, "
            f"{batches.per_epoch} batches an epoch, "
            f"{sum(p.numel() for p in checkpoint.model.parameters()) / 1e6:.1f} M parameters, "
            f"draft vocabulary of {len(checkpoint.vocabulary)} covers "
            f"{self._coverage(checkpoint.vocabulary):.1%} of the held-out answers"
        )
        prompts = self._prompts(num_prompts)

        def evaluate(model: nn.Module) -> dict[str, Any]:
            if not prompts:
                return {}
            return decode(self.target, Eagle3Checkpoint(model, checkpoint.vocabulary), prompts,
                          num_tokens)  # fmt: skip

        def save(model: nn.Module, step: int) -> None:
            card = self._card(step)
            made = Eagle3Checkpoint(model, checkpoint.vocabulary)
            eagle3.write(made, self.folder / DRAFTER, card=card, overwrite=True)

        done = train(
            checkpoint.model,
            objective,
            readout,
            batches,
            config,
            self.folder,
            held_out=self._held_out_batches(),
            evaluate=evaluate,
            on_step=on_step,
            on_save=save,
        )
        card = json.loads((self.folder / DRAFTER / "card.json").read_text(encoding="utf-8"))
        write_card(self.folder / DRAFTER, card, read_metrics(self.folder / "metrics.jsonl"))
        return {
            "path": str(self.folder / DRAFTER),
            "steps": done.steps,
            "tokens": done.tokens,
            "seconds": round(done.seconds, 1),
            "tau": done.last.get("tau"),
        } | {key: value for key, value in done.last.items() if key != "tau"}

    def _first(self) -> Eagle3Checkpoint:
        """The network a run starts with; a resumed run finds its vocabulary in its own drafter."""
        made = self.folder / DRAFTER
        if states(self.folder) and made.is_dir():
            checkpoint = eagle3.read(made)
            checkpoint.model.train()
            return checkpoint
        if self.start_from is not None:
            checkpoint = eagle3.read(
                Path(self.start_from), target_layers=self.target.spec.num_layers
            )
            spec = self.target.spec
            eagle3.check_target(
                checkpoint.model.config,
                vocab_size=self.readout.embedding.shape[0],
                hidden_size=spec.hidden_size,
                num_layers=spec.num_layers,
                name=spec.name,
            )
            checkpoint.model.train()
            return checkpoint
        tokenizer, vocab_size = self.target.tokenizer, self.target.spec.vocab_size
        counts = self.store.vocabulary_counts(self.held_out)[:vocab_size]
        vocabulary = DraftVocabulary.from_counts(
            counts,
            min(self.config.draft_vocab_size, vocab_size),
            always=[*self.target.spec.eos_ids, *tokenizer.special_ids, *tokenizer.byte_ids],
        )
        rows = self.readout.embedding.shape[0]
        vocabulary = DraftVocabulary(vocabulary.target_ids, rows)
        shape = self.target.draft_shape()
        if self.config.intermediate_size is not None:
            shape["intermediate_size"] = self.config.intermediate_size
        model = Eagle3(
            Eagle3Config(
                **shape,
                draft_vocab_size=len(vocabulary),
                taps=tuple(self.store.index.taps),
                max_length=self.target.spec.max_length,
            )
        )
        is_warm = self.config.initial == "target"
        initialise(
            model,
            vocabulary,
            self.store.readout(),
            layer=self.target.layer_weights(-1) if is_warm else None,
            final_norm=self.target.final_norm() if is_warm else None,
            generator=torch.Generator().manual_seed(self.config.seed),
        )
        return Eagle3Checkpoint(model, vocabulary)

    def _held_out_batches(self) -> list[Batch]:
        """Held-out texts, each a batch of its own, up to a number of tokens."""
        batches, tokens = [], 0
        for item in self.held_out:
            sample = self.store[item]
            tokens += len(sample)
            if tokens > HELD_OUT_TOKENS:
                break
            batches.append(
                collate([[sample]], max_length=self.config.max_length, dtype=torch.float32)
            )
        return batches

    def _prompts(self, count: int) -> list[list[int]]:
        """Token ids before the first supervised token of held-out texts."""
        prompts = []
        for item in list(self.held_out)[:count]:
            sample = self.store[item]
            first = int(sample.loss_mask.nonzero()[0])
            if first:
                prompts.append(sample.tokens[:first].tolist())
        return prompts

    def _coverage(self, vocabulary: DraftVocabulary) -> float:
        counts = self.store.supervised_counts(self.held_out or self.items)
        return float(counts[vocabulary.target_ids].sum() / counts.sum().clamp(min=1))

    def _check_store(self, folder: Path) -> None:
        index, spec = self.store.index, self.target.spec
        if len(self.store) == 0:
            raise DataError(f"{folder} holds no text")
        rows = self.readout.embedding.shape[0]
        if (index.hidden_size, index.vocab_size) != (spec.hidden_size, rows):
            raise DataError(
                f"{folder} holds features of '{index.target}' (hidden size {index.hidden_size}, "
                f"vocabulary {index.vocab_size}), {spec.name} has {spec.hidden_size} and {rows}",
                hint="extract features of this target",
            )

    def _card(self, step: int) -> dict[str, Any]:
        index = self.store.index
        return provenance(
            model=self.target.spec.name,
            method=self.config.method,
            step=step,
            config=self.config.model_dump(),
            data={
                "source_sha256": index.source_hash,
                "texts": len(self.items),
                "tokens": sum(self.store.lengths[i] for i in self.items),
                "held_out_texts": len(self.held_out),
                "counts": index.counts,
            },
        )

    def _check_record(self) -> None:
        """A resumed run must have the settings it was started with."""
        path = self.folder / "run.json"
        if not path.is_file():
            return
        free = {"save_every", "evaluate_every"}
        before = json.loads(path.read_text())
        changed = sorted(
            k for k in self.record if k not in free and before.get(k) != self.record[k]
        )
        if changed:
            raise CheckpointError(
                f"{self.folder} was started with other settings: "
                + ", ".join(f"{k} {before.get(k)} then, {self.record[k]} now" for k in changed),
                hint="give the same settings, or choose another --output",
            )

    def _remember(self) -> None:
        """Store the settings, once all inputs have been read: a mistake in them binds nobody."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "run.json"
        temporary = path.with_suffix(".partial")
        temporary.write_text(json.dumps(self.record, sort_keys=True, indent=2) + "\n")
        temporary.replace(path)


def decode(
    target: Any, checkpoint: Eagle3Checkpoint, prompts: list[list[int]], num_tokens: int
) -> dict[str, Any]:
    """Decode prompts greedily with a drafter and its default tree: tau, alpha, reach."""
    from slipstream import methods
    from slipstream.bench import measures
    from slipstream.bench.runner import to_sample

    record = methods.get("eagle3")
    drafter = EagleDrafter.from_model(
        checkpoint,
        target,
        tree=record.tree,
        budget=record.budget,
        depth=record.depth,
        topk=min(record.topk, len(checkpoint.vocabulary)),
    )
    engine = Engine(target, drafter, methods.resolve(methods.VERIFIERS["walk"]), method="eagle3")
    results = engine.generate(prompts, max_new_tokens=num_tokens)
    samples = [to_sample(result, index) for index, result in enumerate(results)]
    reach = measures.reach(samples)
    tau = measures.tau(samples)
    return {
        "tau": None if tau is None else round(tau, 4),
        "reach": [round(value, 4) for value in reach],
        "alpha": [round(value, 4) for value in measures.alpha(reach)],
    }


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in counts.items()) or "nothing left out"

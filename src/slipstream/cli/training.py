"""A training run from a target's name to a drafter's folder: what `slipstream train` does."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from slipstream import assemble
from slipstream.cli.inspection import tell_estimate
from slipstream.data.batches import Batch, collate
from slipstream.data.extract import extract_shards, plan_texts
from slipstream.data.online import OnlineStore
from slipstream.data.store import Store
from slipstream.errors import CheckpointError, DataError
from slipstream.models.readout import Readout
from slipstream.parity.checks import examine
from slipstream.parity.decoding import compare
from slipstream.report.card import read_metrics, write_card
from slipstream.target.hf import load_target
from slipstream.train import recipes
from slipstream.train.adapters import adapt, merged
from slipstream.train.checkpoint import provenance, states
from slipstream.train.config import TrainConfig
from slipstream.train.feed import Batches
from slipstream.train.forecast import forecast
from slipstream.train.loop import measure, train
from slipstream.train.objectives.protocol import Objective
from slipstream.train.recipes.recipe import Checkpoint, Material, Settings

DRAFTER = "drafter"
PLACES = {"last": DRAFTER, "best": "best", "milestone": "milestones/step-{step:08d}"}
"""Folders of drafters within a run."""
FEATURES = "features"
GUARD = 0.005  # tokens a pass that a fine-tuned drafter may lose to rounding
PARITY_PROMPTS = 4  # decoded as chains beside teacher forcing
HELD_OUT_TOKENS = 32_768  # at most, so that evaluations stay short


class Run:
    """One run.

    Args:
        config: settings of the loop.
        settings: the method's own.
        folder: everything is written here.
        model: the target's name.
        drafter: folder of a drafter to start from, or None.
        target_options: dtype, device, threads.
        say: prints a line for people.
        is_main: this process writes the run's files.
    """

    def __init__(
        self,
        config: TrainConfig,
        settings: Settings,
        folder: Path,
        *,
        model: str,
        drafter: str | None,
        target_options: dict[str, Any],
        say: Callable[[str], None],
        is_main: bool = True,
    ) -> None:
        self.config, self.folder, self.say, self.is_main = config, folder, say, is_main
        self.start_from = None if drafter is None else Path(drafter)
        self.recipe, self.settings = recipes.get(config.method), settings
        self.target = load_target(model, **target_options)
        self.readout = Readout(self.target.embedding(), self.target.head())
        self.taps = self._taps()
        self.record = {"model": model, "drafter": drafter} | self._settings()
        self._check_record()

    def open(
        self,
        data: Path,
        *,
        is_online: bool,
        resume: bool,
        on_progress: Callable[[int, int, int, float], None],
        **making: Any,
    ) -> None:
        """Open a store, make one of a data file in the run's folder, or take features as we go.

        Args:
            data: a store, or a JSONL file.
            is_online: compute the features of a file as training asks for them.
            resume: go on in an existing folder.
            on_progress: see `extract_shards`.
            **making: see `plan_texts`.
        """
        spec, tokenizer = self.target.spec, self.target.tokenizer
        if is_online:
            planned = plan_texts(data, tokenizer, max_length=self.config.max_length, **making)
            self.store: Store | OnlineStore = OnlineStore(
                self.target, self.readout, planned, name=spec.name, taps=self.taps
            )
            self.say(f"features as it trains; {_counted(self.store.index.counts)}")
        else:
            if not data.is_dir():
                folder = self.folder / FEATURES
                done = extract_shards(
                    self.target,
                    self.readout,
                    data,
                    folder,
                    name=spec.name,
                    tokenizer=tokenizer,
                    taps=self.taps,
                    max_length=self.config.max_length,
                    resume=resume,
                    on_estimate=lambda plan: self.say(tell_estimate(plan, folder)),
                    on_progress=on_progress,
                    **making,
                )
                self.say(
                    f"features: {done.rows} texts, {done.tokens:,} tokens, "
                    f"{done.bytes / 1e9:.2f} GB; {_counted(done.counts)}"
                )
                data = folder
            self.store = Store(data, taps=self.taps)
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
        if self.config.lora_rank is not None:
            adapt(checkpoint.model, self.config.lora_rank, seed=self.config.seed)
        if self.is_main:
            self._remember()
        config = self.config
        objective = self.recipe.objective(checkpoint, self.settings)
        readout = self.store.readout()
        batches = Batches(self.store, self.items, config)
        self.say(
            f"{len(self.items)} texts, {sum(batches.lengths):,} tokens, "
            f"{batches.per_epoch} batches an epoch, "
            f"{sum(p.numel() for p in checkpoint.model.parameters()) / 1e6:.1f} M parameters"
            + self._coverage(checkpoint)
        )
        prompts = self._prompts(num_prompts)

        def evaluate() -> dict[str, Any]:
            if not prompts:
                return {}
            with tempfile.TemporaryDirectory(dir=self.folder) as place:
                made = Path(place) / DRAFTER
                self.recipe.layout.write(_plain(checkpoint), made)
                found = decode(self.target, config.method, made, prompts, num_tokens)
                return found | self._parity(made, checkpoint, objective, prompts, num_tokens)

        def save(kind: str, step: int) -> None:
            folder = self.folder / PLACES[kind].format(step=step)
            self.recipe.layout.write(
                _plain(checkpoint), folder, card=self._card(step), overwrite=True
            )

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
            is_cpu=self.target.spec.device.type == "cpu",
            provenance=self._card(None),
        )
        kept_old = outlook = None
        if done.is_main:
            self._write_cards()
            kept_old = self._keep_the_better(readout, prompts, num_tokens)
            outlook = forecast(read_metrics(self.folder / "metrics.jsonl"))
            self.say(str(outlook) if outlook else "too few rising evaluations for a forecast")
        return {
            "path": str(self.folder / DRAFTER),
            "steps": done.steps,
            "tokens": done.tokens,
            "seconds": round(done.seconds, 1),
            "tau": done.last.get("tau"),
            "kept_old": kept_old,
            "forecast": None if outlook is None else asdict(outlook),
        } | {key: value for key, value in done.last.items() if key != "tau"}

    def _parity(
        self,
        drafter: Path,
        checkpoint: Checkpoint,
        objective: Objective,
        prompts: list[list[int]],
        num_tokens: int,
    ) -> dict[str, Any]:
        """Chains decoded by the engine beside what the objective says of the same steps."""
        found = compare(
            self.target, self.config.method, drafter, checkpoint, objective, self.store.readout(),
            prompts[:PARITY_PROMPTS], num_tokens=num_tokens,
        )  # fmt: skip
        if found is None:
            return {}
        if not found.is_kept:
            checks = examine(self.target, self.config.method, drafter, self._questions(prompts))
            causes = [f"{c.name}: {c.detail}" for c in checks if not c.ok and c.name != "decoding"]
            self.say(
                f"warning: decoding accepts {_listed(found.decoded)} of {found.num_starts} chains "
                f"by depth, training says {_listed(found.text)} at the same positions (tolerance "
                f"{found.tolerance:.2f}); "
                + ("; ".join(causes) or "no reading of the files explains it")
            )
        return {
            "decoded_accuracy": list(found.decoded),
            "text_accuracy": list(found.text),
            "is_parity_kept": found.is_kept,
        }

    def _questions(self, prompts: list[list[int]]) -> list[str]:
        """User texts to examine the drafter with, as near to the prompts as text can be."""
        decode = self.target.tokenizer.decode
        return [text for text in (decode(ids).strip()[-400:] for ids in prompts[:4]) if text]

    def _keep_the_better(
        self, readout: Readout, prompts: list[list[int]], num_tokens: int
    ) -> str | None:
        """After fine-tuning: put the old drafter back where the new one is worse, and say so.

        Both are judged on the same held-out texts, or by decoding where there are none.
        """
        if self.start_from is None:
            return None
        folder, held_out, found = self.folder / DRAFTER, self._held_out_batches(), []
        for place in (self.start_from, folder):
            read = self.recipe.layout.read(place, target_layers=self.target.spec.num_layers)
            objective = self.recipe.objective(read, self.settings)
            judged = measure(read.model, objective, readout, held_out)
            if not judged and prompts:
                judged = decode(self.target, self.config.method, place, prompts, num_tokens)
            found.append(judged.get("chain_tau", judged.get("tau")))
        old, new = found
        if old is None or new >= old - GUARD:
            return None
        aside = self.folder / "worse"
        shutil.rmtree(aside, ignore_errors=True)
        folder.replace(aside)
        shutil.copytree(self.start_from, folder)
        return (
            f"fine-tuning made held-out text worse: {new:.3f} tokens a pass, {old:.3f} before "
            f"(the trained one is in {aside})"
        )

    def _write_cards(self) -> None:
        """Cards with curves for the newest drafter and the best one."""
        records = read_metrics(self.folder / "metrics.jsonl")
        for kind in ("last", "best"):
            folder = self.folder / PLACES[kind]
            if folder.is_dir():
                card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
                write_card(folder, card, [r for r in records if r["step"] <= card["step"]])

    def _first(self) -> Checkpoint:
        """The network a run starts with; a resumed run finds its vocabulary in its own drafter."""
        made = self.folder / DRAFTER
        layers = self.target.spec.num_layers
        if states(self.folder) and made.is_dir():
            checkpoint = self.recipe.layout.read(made, target_layers=layers)
        elif self.start_from is not None:
            checkpoint = self._start_from(self.start_from)
        else:
            checkpoint = self.recipe.make(self._material(), self.settings)
        checkpoint.model.train()
        return checkpoint

    def _start_from(self, folder: Path) -> Checkpoint:
        """A given drafter, if it was made for this target."""
        spec = self.target.spec
        checkpoint = self.recipe.layout.read(folder, target_layers=spec.num_layers)
        self.recipe.layout.check_target(
            checkpoint.model.config,
            vocab_size=self.readout.embedding.shape[0],
            hidden_size=spec.hidden_size,
            num_layers=spec.num_layers,
            name=spec.name,
        )
        return checkpoint

    def _material(self) -> Material:
        """What a fresh network is made from."""
        target, spec = self.target, self.target.spec
        return Material(
            name=spec.name,
            num_layers=spec.num_layers,
            max_length=spec.max_length,
            shape=target.draft_shape(),
            taps=self.store.taps,
            readout=self.store.readout(),
            counts=self.store.vocabulary_counts(self.held_out)[: spec.vocab_size],
            always=(*spec.eos_ids, *target.tokenizer.special_ids, *target.tokenizer.byte_ids),
            spare=target.tokenizer.spare_ids,
            layer_weights=target.layer_weights,
            final_norm=target.final_norm(),
            generator=torch.Generator().manual_seed(self.config.seed),
        )

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

    def _coverage(self, checkpoint: Checkpoint) -> str:
        """What share of the held-out answers a reduced vocabulary can say, for people."""
        vocabulary = getattr(checkpoint, "vocabulary", None)
        if vocabulary is None or vocabulary.is_full:
            return ""
        counts = self.store.supervised_counts(self.held_out or self.items)
        share = float(counts[vocabulary.target_ids].sum() / counts.sum().clamp(min=1))
        return f", draft vocabulary of {len(vocabulary)} covers {share:.1%} of the held-out answers"

    def _taps(self) -> tuple[int, ...]:
        """A given drafter's taps, or those that the method asks for."""
        layers = self.target.spec.num_layers
        if self.start_from is None:
            return self.recipe.taps(self.settings, layers)
        checkpoint = self.recipe.layout.read(self.start_from, target_layers=layers)
        return tuple(getattr(checkpoint.model.config, "taps", ()))

    def _settings(self) -> dict[str, Any]:
        """The loop's and the method's settings together."""
        return self.config.model_dump() | self.settings.model_dump(mode="json")

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

    def _card(self, step: int | None) -> dict[str, Any]:
        index = self.store.index
        return provenance(
            model=self.target.spec.name,
            method=self.config.method,
            step=step,
            config=self._settings(),
            template=self.target.tokenizer.fingerprint,
            template_mode=self.target.tokenizer.template_mode,
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
        free = {"save_every", "evaluate_every", "milestone_every", "tracker", "recompute"}
        before = json.loads(path.read_text())
        changed = sorted(
            k for k in self.record if k in before.keys() - free and before[k] != self.record[k]
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
    target: Any, method: str, drafter: Path, prompts: list[list[int]], num_tokens: int
) -> dict[str, Any]:
    """Decode prompts greedily with a written drafter and its default tree: tau, alpha, reach."""
    from slipstream.bench import measures
    from slipstream.bench.runner import to_sample

    engine = assemble.load(target, method, drafter=drafter)
    results = engine.generate(prompts, max_new_tokens=num_tokens)
    samples = [to_sample(result, index) for index, result in enumerate(results)]
    reach = measures.reach(samples)
    tau = measures.tau(samples)
    return {
        "tau": None if tau is None else round(tau, 4),
        "reach": [round(value, 4) for value in reach],
        "alpha": [round(value, 4) for value in measures.alpha(reach)],
    }


def _plain(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as it is written: adapters added to the weights."""
    model = merged(checkpoint.model)
    return checkpoint if model is checkpoint.model else replace(checkpoint, model=model)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in counts.items()) or "nothing left out"

"""A training run from a target's name to a drafter's folder: what `slipstream train` does."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from slipstream.cli.checks import set_thinking
from slipstream.cli.held_out import HeldOut
from slipstream.cli.inspection import tell_estimate
from slipstream.data.extract import extract_shards, plan_texts
from slipstream.data.online import OnlineStore
from slipstream.data.store import Store
from slipstream.errors import CheckpointError, DataError, SettingError
from slipstream.models.readout import Readout
from slipstream.report.card import origin, read_metrics, write_card
from slipstream.target.hf import load_target
from slipstream.train import recipes
from slipstream.train.adapters import adapt, merged
from slipstream.train.checkpoint import provenance, states
from slipstream.train.config import TrainConfig
from slipstream.train.feed import Batches
from slipstream.train.forecast import forecast
from slipstream.train.loop import train
from slipstream.train.recipes.recipe import Checkpoint, Material, Settings

DRAFTER = "drafter"
PLACES = {"last": DRAFTER, "best": "best", "milestone": "milestones/step-{step:08d}"}
"""Folders of drafters within a run."""
FEATURES = "features"
EVALUATED = ".evaluated-"  # folders of drafters that are being decoded with
LEFT = (f"{EVALUATED}*", ".drafter-*", ".best-*", "milestones/.step-*")
"""What a kill may leave half written."""
ROUNDING = 2**-7
"""What another number type on the way to bfloat16 may change of a value: one step."""
SAME_TARGET = 0.01
"""Share that may differ by more. Weights moved by a thousandth of their size differ in 8%."""


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
        thinking: "on" or "off" for templates that have the choice.
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
        thinking: str | None = None,
    ) -> None:
        self.config, self.folder, self.say, self.is_main = config, folder, say, is_main
        self.start_from = None if drafter is None else Path(drafter)
        self.recipe, self.settings = recipes.get(config.method), settings
        self.target = load_target(model, **target_options)
        set_thinking(self.target.tokenizer, thinking)
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
        if not data.is_dir():
            self._bind(making)  # before a store is made longer or shorter by them
        if is_online:
            planned = plan_texts(
                data, tokenizer, model=spec.name, max_length=self.config.max_length, **making
            )
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
        self._check_template(data)
        index = self.store.index
        made = {"source_sha256": index.source_hash, "texts": len(self.store)}
        self._bind(made | index.settings)
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
        objective = self.recipe.objective(checkpoint, self.settings)  # may add to the network
        if self.config.lora_rank is not None:
            adapt(checkpoint.model, self.config.lora_rank, seed=self.config.seed)
        if self.is_main:
            self._remember()
        config = self.config
        readout = self.store.readout()
        batches = Batches(self.store, self.items, config)
        self.say(
            f"{len(self.items)} texts, {sum(batches.lengths):,} tokens, "
            f"{batches.per_epoch} batches an epoch, "
            f"{sum(p.numel() for p in checkpoint.model.parameters()) / 1e6:.1f} M parameters"
            + self._coverage(checkpoint)
        )
        held_out = HeldOut(
            self.target, config.method, self.recipe, self.settings, self.store, self.held_out,
            max_length=config.max_length, num_prompts=num_prompts, num_tokens=num_tokens,
            say=self.say,
        )  # fmt: skip

        def evaluate() -> dict[str, Any]:
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=EVALUATED) as place:
                made = Path(place) / DRAFTER
                self.recipe.layout.write(_plain(checkpoint), made)
                return held_out.decode(made) | held_out.parity(made, checkpoint, objective)

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
            held_out=held_out.batches(),
            evaluate=evaluate,
            on_step=on_step,
            on_save=save,
            device=self.target.spec.device,
            provenance=self._card(None),
        )
        kept_old = outlook = None
        if done.is_main:
            self._write_cards()
            kept_old = self._keep_the_better(held_out)
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

    def _keep_the_better(self, held_out: HeldOut) -> str | None:
        """After fine-tuning: put the old drafter back where the new one is worse, and say so."""
        folder, aside = self.folder / DRAFTER, self.folder / "worse"
        verdict = None if self.start_from is None else held_out.verdict(self.start_from, folder)
        if verdict is None:
            return None
        shutil.rmtree(aside, ignore_errors=True)
        folder.replace(aside)
        shutil.copytree(self.start_from, folder)
        return f"{verdict} (the trained one is in {aside})"

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
        layers = self.target.spec.num_layers
        checkpoint = self.recipe.layout.read(folder, target_layers=layers)
        self.recipe.layout.check_target(checkpoint, self.target)
        if getattr(checkpoint.model.config, "has_embedding", False):
            raise SettingError(
                "drafter", folder, "one that reads the target's embedding: training does",
                "train a new drafter without --drafter",
            )  # fmt: skip
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
        if isinstance(self.store, Store) and (share := self._foreign_share()) > SAME_TARGET:
            raise DataError(
                f"{folder} holds features of '{index.target}', which has the sizes of {spec.name} "
                f"but another embedding or head ({share:.0%} of the values differ)",
                hint="extract features of this target",
            )

    def _foreign_share(self) -> float:
        """Share of the store's embedding or head that is not the target's, but for rounding."""
        theirs, shares = self.store.readout(torch.bfloat16), []
        for name in ("embedding", "head"):
            stored = getattr(theirs, name)
            ours = getattr(self.readout, name).to("cpu", torch.bfloat16)
            differs = (ours - stored).abs() > ROUNDING * stored.abs()
            shares.append(int(differs.sum()) / differs.numel())
        return max(shares)

    def _check_template(self, folder: Path) -> None:
        """Refuse features of chats that were written in another way than they are served."""
        tokenizer, made = self.target.tokenizer, self.store.index.settings
        for what, ours, theirs in (
            ("chat template", tokenizer.fingerprint, made.get("template")),
            ("template mode", tokenizer.template_mode, made.get("template_mode")),
        ):
            if theirs is not None and ours != theirs:
                raise DataError(
                    f"{folder} was made with {what} {theirs}, the model now has {ours}",
                    hint="extract again, or give the option --thinking that it was made with",
                )

    def _card(self, step: int | None) -> dict[str, Any]:
        index = self.store.index
        before = {} if self.start_from is None else {"started_from": origin(self.start_from)}
        return before | provenance(
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

    def _bind(self, data: dict[str, Any]) -> None:
        """Remember what the data is made of: held-out texts must stay held out when resumed."""
        named = {f"data {name}": value for name, value in data.items()}
        self.record |= json.loads(json.dumps(named))  # as it will be read
        self._check_record()

    def _check_record(self) -> None:
        """A resumed run must have the settings and the data it was started with."""
        path = self.folder / "run.json"
        if not path.is_file():
            return
        free = {"save_every", "evaluate_every", "milestone_every", "tracker", "recompute", "shard"}
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
        for left in (path for pattern in LEFT for path in self.folder.glob(pattern)):
            shutil.rmtree(left, ignore_errors=True)
        path = self.folder / "run.json"
        temporary = path.with_suffix(".partial")
        temporary.write_text(json.dumps(self.record, sort_keys=True, indent=2) + "\n")
        temporary.replace(path)


def _plain(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as it is written: adapters added to the weights."""
    model = merged(checkpoint.model)
    return checkpoint if model is checkpoint.model else replace(checkpoint, model=model)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in counts.items()) or "nothing left out"

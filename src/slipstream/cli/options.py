"""The options that verbs share, spelled once.

A verb collects them in a `Setup` (which model, which method) and a `Decoding` (how to sample);
both check themselves when they are made, before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream import assemble, methods
from slipstream.cli.checks import (
    DEFAULT_MODEL,
    check_at_least_one,
    check_model,
    check_name,
)
from slipstream.cli.output import quiet_libraries, tell
from slipstream.errors import SettingError

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64", "int8", "int4", "w8a8", "w4a8")

ModelOption = Annotated[
    str,
    typer.Option(
        "--model", help="Embedded name, Hugging Face id, local folder or .gguf file.", metavar="M"
    ),
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        metavar="FOLDER|zoo:METHOD",
        help="Draft checkpoint; without it, the zoo's for this model and method.",
    ),
]
MethodOption = Annotated[
    str, typer.Option("--method", metavar="NAME", help="A name from `slipstream methods`.")
]
TreeOption = Annotated[
    str | None, typer.Option("--tree", metavar="SHAPE", help=f"One of {', '.join(methods.TREES)}.")
]
VerifierOption = Annotated[
    str | None,
    typer.Option(
        "--verifier", metavar="RULE", help=f"One of {', '.join(methods.marked(methods.VERIFIERS))}."
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="N|auto",
        help="Drafted nodes per step, root not counted; auto: as many as pay for themselves here.",
    ),
]
DepthOption = Annotated[
    int | None, typer.Option("--depth", help="Deepest drafted node; a chain of 5 has depth 5.")
]
ChildrenOption = Annotated[
    int | None, typer.Option("--topk", help="Children scored per node, and the beam.")
]
WidthOption = Annotated[
    int | None, typer.Option("--width", help="Slots of a drafted block, the root's included.")
]
LookupOption = Annotated[
    bool, typer.Option("--lookup", help="Unite the drafter's tree with prompt lookup.")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help=f"One of {', '.join(DTYPES)}.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", help="CPU threads; physical cores by default.")
]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopPOption = Annotated[float, typer.Option("--top-p", help="Nucleus, in (0, 1].")]
TopKOption = Annotated[int, typer.Option("--top-k", help="Most likely tokens kept; 0 keeps all.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Key of the sampling noise.")]
MaxNewTokensOption = Annotated[
    int, typer.Option("--max-new-tokens", help="Tokens an answer may have.")
]
RawOption = Annotated[
    bool, typer.Option("--raw", help="Give the prompt to the model without its chat template.")
]
PromptOption = Annotated[
    str | None, typer.Option("--prompt", metavar="TEXT", help="One prompt, a user turn.")
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="JSONL rows with turns, messages, conversations or prompt.",
    ),
]
NumRowsOption = Annotated[
    int, typer.Option("--num-rows", help="Prompts decoded together, as one rolling batch.")
]
LimitOption = Annotated[int | None, typer.Option("--limit", help="Read this many prompts only.")]
ThinkingOption = Annotated[
    str | None,
    typer.Option("--thinking", help="on or off, for chat templates that have the choice."),
]
AllTurnsOption = Annotated[
    bool, typer.Option("--all-turns", help="Every user turn in order, not the first alone.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="One JSON value on standard output, nothing else there.")
]


@dataclass(frozen=True, slots=True)
class Setup:
    """Which model, which method, on what. Checked when made, loaded by `load`.

    Raises:
        UnknownNameError: method, tree, verifier or dtype is in no catalogue.
        SettingError: a number is below 1, or the method cannot draft or judge so.
        UnsupportedTargetError: the model is a path that does not exist.
        CheckpointError: there is no such drafter.
    """

    model: str = DEFAULT_MODEL
    method: str = "eagle3"
    drafter: str | None = None
    tree: str | None = None
    verifier: str | None = None
    budget: int | str | None = None
    depth: int | None = None
    topk: int | None = None
    lookup: bool = False
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        record = methods.get(self.method)
        check_name("dtype", self.dtype, DTYPES)
        check_at_least_one("threads", self.threads)
        wishes = {
            name: getattr(self, name) for name in ("tree", "verifier", "depth", "topk", "width")
        }
        budget = _number_or_auto(self.budget)
        object.__setattr__(self, "budget", budget)
        is_auto = budget == assemble.AUTO
        shape = assemble.decide(record, **wishes, budget=None if is_auto else budget)
        if is_auto:
            assemble.check_auto(record, shape.tree)
        check_model(self.model)
        if record.needs_checkpoint:
            assemble.locate(self.drafter, record.name, self.model)
        elif self.drafter is not None:
            raise SettingError(
                "drafter",
                self.drafter,
                f"nothing: {record.name} has no draft network",
                "leave --drafter out",
            )

    def rule(self) -> str:
        """The verifier that will judge."""
        return self.verifier or methods.get(self.method).verifier

    def load(self, *, model: object = None, **changes: object) -> Engine:
        """Load target and drafter.

        Args:
            model: an already loaded target to use in place of `self.model`.
            changes: fields to replace, by name.
        """
        quiet_libraries()
        import slipstream
        from slipstream.bench.environment import Watch

        watch = Watch()
        settings = {name: getattr(self, name) for name in self.__dataclass_fields__} | changes
        if model is not None:
            settings["model"] = model
        engine = slipstream.load(settings.pop("model"), settings.pop("method"), **settings)
        note_busy(watch.others())
        return engine


def _number_or_auto(budget: int | str | None) -> int | str | None:
    """The budget as typed: a number, or "auto"."""
    if budget is None or isinstance(budget, int) or budget == assemble.AUTO:
        return budget
    try:
        return int(budget)
    except ValueError:
        raise SettingError("budget", f"'{budget}'", "a whole number, or auto") from None


def note_busy(share: float | None) -> None:
    """Say on standard error that other programs take a share of the CPU, if it is a large one."""
    from slipstream.bench.environment import BUSY_SHARE

    if share is not None and share > BUSY_SHARE:
        tell(
            f"note: other programs take {share:.0%} of the CPU, so this is slower than it could "
            "be; --threads leaves cores to them"
        )


@dataclass(frozen=True, slots=True)
class Decoding:
    """How long and how random an answer is. Checked when made.

    Raises:
        SettingError: a value is outside its range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least_one("max-new-tokens", self.max_new_tokens)
        if not 0 <= self.temperature < float("inf"):
            raise SettingError("temperature", self.temperature, "0 or more", "use 0 for greedy")
        if self.top_k < 0:
            raise SettingError("top-k", self.top_k, "0 or more", "use 0 to keep all tokens")
        if not 0 < self.top_p <= 1:
            raise SettingError("top-p", self.top_p, "in (0, 1]", "use 1 to keep all tokens")

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `Engine.generate` and `Engine.stream`."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

"""From names to a running engine: `load` finds the method, the target and the drafter."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream import methods
from slipstream.errors import CheckpointError, SettingError, UnknownNameError
from slipstream.formats import hub
from slipstream.methods import Method

if TYPE_CHECKING:
    from slipstream.drafters.protocol import Drafter
    from slipstream.engine.engine import Engine
    from slipstream.target.passes import StepCost
    from slipstream.target.protocol import Target

AUTO = "auto"
AUTO_BUDGET = 32  # drafted nodes at most when they have to pay for themselves
AUTO_TREES = ("dynamic", "best-first")
ROOM = 64  # drafted nodes a row gets room for, whatever a user's own drafter says


@dataclass(frozen=True, slots=True)
class Shape:
    """Which trees a drafter grows and who judges them; every field is decided."""

    tree: str
    verifier: str
    budget: int
    depth: int
    topk: int
    width: int | None = None


def load(
    model: str | Target = "smollm2-135m",
    method: str = "eagle3",
    *,
    drafter: str | Path | Drafter | None = None,
    tree: str | None = None,
    verifier: str | None = None,
    budget: int | str | None = None,
    depth: int | None = None,
    topk: int | None = None,
    width: int | None = None,
    lookup: bool = False,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    max_length: int | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> Engine:
    """Load a target and a drafter into an engine.

    Args:
        model: an embedded name, a Hugging Face id, a folder, a .gguf file, or a loaded target.
        method: a name from `methods`; ignored when `drafter` is an object.
        drafter: a checkpoint folder in any known dialect, "zoo:METHOD", a Hugging Face id
            (ORG/NAME or ORG/NAME@REVISION), or an object with the Drafter protocol; None takes
            the zoo's drafter for the model.
        tree: kind of draft tree; None takes the method's default, as do the next four.
        verifier: acceptance rule.
        budget: drafted nodes, root not counted; "auto" keeps as many of each tree as pay for
            themselves, possibly none, by the seconds of this machine's passes (measured at the
            first use of a model, which takes a few seconds, and remembered).
        depth: deepest drafted node.
        topk: children scored per node.
        width: slots of a drafted block, of methods that draft blocks; None takes the checkpoint's.
        lookup: merge in what prompt lookup proposes, on top of the budget.
        dtype: of the target's weights.
        device: where it runs.
        threads: CPU threads; None takes the physical cores.
        max_length: context in tokens; None takes the target's.
        revision: branch, tag or commit of the model, where it is a Hugging Face id.
        token: of Hugging Face, for private and gated models and drafters; None takes HF_TOKEN or
            the login of `hf auth`.

    Raises:
        UnknownNameError: no such method, tree or verifier.
        SettingError: a value is outside its range or does not fit the method.
        CheckpointError: the drafter's checkpoint is missing or broken.
        DrafterMismatchError: the drafter was made for another target.
        UnsupportedTargetError: the model cannot be a target.
    """
    is_own = drafter is not None and not isinstance(drafter, str | Path)
    record = _own(drafter) if is_own else methods.get(method)
    is_auto = budget == AUTO
    shape = decide(record, tree=tree, verifier=verifier, depth=depth, topk=topk, width=width,
                   budget=AUTO_BUDGET if is_auto else budget)  # fmt: skip
    if is_auto:
        check_auto(record, shape.tree)
    if lookup:
        _check_lookup(shape.verifier)
    if drafter is not None and not is_own and not record.needs_checkpoint:
        raise SettingError(
            "drafter",
            drafter,
            f"nothing: method {record.name} has no draft network",
            f"leave it out, or choose a method with one: {', '.join(_with_network())}",
        )
    folder = None
    if not is_own and record.needs_checkpoint:
        folder = locate(drafter, record.name, model, token=token)
    account = {"revision": revision, "token": token}
    target = _target(model, dtype=dtype, device=device, threads=threads, **account)
    cost = _cost_of(target) if is_auto else None
    built = drafter if is_own else _build(record, shape, folder, target, cost, token=token)
    if lookup:
        built, shape = _with_lookup(built, shape)
    from slipstream.engine.engine import Engine, meter_for

    on_lap = None if cost is None else lambda lap: cost.learn(lap.draft + lap.other)
    verify: Any = methods.resolve(methods.VERIFIERS[shape.verifier])
    return Engine(
        target,
        built,
        verify,
        method=record.name,
        max_length=max_length,
        max_nodes=max(ROOM, shape.budget),
        settings={
            **asdict(shape),
            "auto": is_auto,
            "lookup": lookup,
            "lossless": shape.verifier not in methods.LOSSY,
        },
        meter=meter_for(target, on_lap),
    )


def decide(method: Method, **wishes: Any) -> Shape:
    """Fill a user's wishes up with the method's defaults.

    Args:
        method: the record.
        **wishes: tree, verifier, budget, depth, topk, width; None or absent takes the default.

    Raises:
        UnknownNameError: no such tree or verifier.
        SettingError: a number is below 1, or the method cannot draft or judge so.
    """
    given = {name: value for name, value in wishes.items() if value is not None}
    for name in ("budget", "depth", "topk", "width"):
        if given.get(name, 1) < 1:
            raise SettingError(
                name, given[name], "1 or more", "to draft nothing, use --method none"
            )
    for kind, known, fitting in (
        ("tree", methods.TREES, method.trees),
        ("verifier", tuple(methods.VERIFIERS), method.verifiers),
    ):
        name = given.get(kind)
        if name is not None and name not in known:
            raise UnknownNameError(kind, name, known)
        if name is not None and name not in fitting:
            raise SettingError(
                kind,
                name,
                f"one of {', '.join(fitting)} for {method.name}",
                f"leave {kind} out, or choose another method",
            )
    tree = given.get("tree", method.tree)
    verifier = given.get("verifier", method.verifier)
    _check_used(method, tree, given)
    _check_judged(method, tree, verifier)
    depth = given.get("depth", method.depth)
    budget = given.get("budget", method.budget)
    if tree == "chain":  # one node per level: budget and depth are the same thing
        asked = [given[name] for name in ("budget", "depth") if name in given]
        budget = depth = min(asked) if asked else method.depth
    return Shape(
        tree=tree,
        verifier=verifier,
        budget=budget,
        depth=depth,
        topk=1 if tree == "chain" else given.get("topk", method.topk),
        width=given.get("width"),
    )


def _check_used(method: Method, tree: str, given: dict[str, Any]) -> None:
    """Raises SettingError for a number that the method or its tree would ignore."""
    if method.name == "none":
        for name in given.keys() & {"budget", "depth", "topk"}:
            raise SettingError(
                name, given[name], "nothing: none drafts nothing", f"leave {name} out"
            )
    if "width" in given and not method.has_width:
        blocks = ", ".join(each.name for each in methods.all() if each.has_width)
        raise SettingError(
            "width",
            given["width"],
            f"nothing: {method.name} drafts no blocks",
            f"leave width out, or choose a method that does: {blocks}",
        )
    if tree in ("chain", "static") and given.get("topk", 1) != 1:
        raise SettingError(
            "topk", given["topk"], f"nothing: a {tree} tree has no use for it", "leave topk out"
        )


def _check_judged(method: Method, tree: str, verifier: str) -> None:
    """Raises SettingError for a rule that cannot judge a kind of tree."""
    children = methods.CHILDREN[verifier]
    if children == "chosen":
        return
    fitting = ("chain",) if verifier in methods.FOR_CHAINS else methods.FIXED_TREES
    if tree not in fitting:
        within = [kind for kind in fitting if kind in method.trees] or list(fitting)
        raise SettingError(
            "verifier",
            f"{verifier} with a {tree} tree",
            f"a {' or '.join(fitting)} tree: {verifier} judges {children} nodes, "
            + ("one below the other" if verifier in methods.FOR_CHAINS else "which are not pruned"),
            f"add --tree {within[0]}, or leave the verifier out for walk, which judges any tree",
        )


def _check_lookup(verifier: str) -> None:
    """Raises SettingError for a rule that cannot judge what lookup adds."""
    children = methods.CHILDREN[verifier]
    if children != "chosen":
        raise SettingError(
            "lookup",
            f"on with verifier {verifier}",
            f"off: what lookup adds is chosen, and {verifier} judges {children} nodes",
            "leave lookup out, or leave the verifier out for walk",
        )


def locate(
    drafter: str | Path | None, method: str, model: object, *, token: str | None = None
) -> Path:
    """The folder of a draft checkpoint.

    Args:
        drafter: a folder, "zoo:METHOD", a Hugging Face id, or None for the zoo's drafter of this
            method; where whole models may draft, also a model's name.
        method: a method's name.
        model: the target, as a name or loaded.
        token: of Hugging Face.

    Raises:
        CheckpointError: there is no such folder, and the hub does not give one.
    """
    name = str(drafter) if drafter is not None else f"zoo:{method}"
    if not name.startswith("zoo:"):
        folder = Path(name).expanduser()
        if not folder.is_dir() and "huggingface" in methods.get(method).formats:
            return Path(name)  # a whole model, by its name
        if not folder.is_dir() and hub.is_id(name):
            return hub.fetch(name, token=token)
        if not folder.is_dir():
            raise CheckpointError(
                f"drafter '{name}' is no folder, expected a draft checkpoint",
                hint="give the folder that holds config.json, or zoo:METHOD",
            )
        return folder
    target = model if isinstance(model, str) else model.spec.name  # type: ignore[attr-defined]
    record = methods.get(name.removeprefix("zoo:"))
    wanted = record.weights or record.name
    folder = zoo_folder() / f"{wanted}-{target}"
    if not folder.is_dir():
        train = "train one with `slipstream train`, " if methods.get(wanted).is_trainable else ""
        raise CheckpointError(
            f"the zoo has no {wanted} drafter for '{target}', expected "
            f"{wanted}-{Path(target).name}/ in the checkout's zoo folder",
            hint=f"give --drafter FOLDER, {train}or run from a "
            "checkout (the zoo is not part of the installed package)",
        )
    return folder


def zoo_folder() -> Path:
    """Where the drafters that ship lie: `zoo/` in the checkout; it may not exist."""
    return Path(__file__).resolve().parents[2] / "zoo"


def _own(drafter: object) -> Method:
    """A record for a user's own drafter: every tree and every rule is theirs to choose."""
    name = str(getattr(drafter, "name", type(drafter).__name__))
    return Method(
        name=name,
        title=name,
        paper="",
        drafter="",
        trees=methods.TREES,
        verifiers=tuple(methods.VERIFIERS),
        note="a drafter of your own",
    )


def _with_network() -> list[str]:
    return [method.name for method in methods.all() if method.needs_checkpoint]


def _target(model: str | Target, **options: Any) -> Any:
    if not isinstance(model, str | Path):
        return model
    from slipstream.target.hf import load_target

    return load_target(str(model), **options)


def check_auto(method: Method, tree: str) -> None:
    """Raises SettingError where the number of nodes is not the scores' to decide."""
    if method.drafter and tree in AUTO_TREES:
        return
    fitting = [kind for kind in AUTO_TREES if kind in method.trees]
    raise SettingError(
        "budget",
        AUTO,
        f"a number for a {tree} tree: only the scores of {' and '.join(AUTO_TREES)} trees can say "
        "what pays",
        f"add --tree {fitting[0]}" if fitting and method.drafter else "give a number",
    )


def _cost_of(target: Target) -> StepCost:
    """What a step costs on this machine: measured once per model, then remembered."""
    from slipstream.target.embedded import cache_root
    from slipstream.target.passes import StepCost, remembered

    return StepCost(remembered(target, cache_root() / "cost"))


def _build(
    record: Method,
    shape: Shape,
    folder: Path | None,
    target: Target,
    cost: StepCost | None,
    *,
    token: str | None,
) -> Drafter:
    """The method's drafter; it is told what its signature has a place for."""
    from slipstream.target.hardware import return_memory
    from slipstream.trees.kinds import Growth

    drafter: Any = methods.resolve(record.drafter)
    growth = Growth(
        shape.tree,
        shape.budget,
        shape.depth,
        shape.topk,
        children=methods.CHILDREN[shape.verifier],
        cost=cost,
    )
    told = asdict(shape) | {"growth": growth, "token": token}
    make = drafter if folder is None else partial(drafter.from_checkpoint, folder, target)
    takes = inspect.signature(make).parameters
    built: Drafter = make(**{name: value for name, value in told.items() if name in takes})
    return_memory()  # the checkpoint's, which was laid out anew
    return built


def _with_lookup(drafter: Drafter, shape: Shape) -> tuple[Drafter, Shape]:
    """Prompt lookup's nodes come on top of the drafter's own budget."""
    from slipstream.drafters.ngram import NgramDrafter
    from slipstream.drafters.union import UnionDrafter

    if isinstance(drafter, NgramDrafter):
        return drafter, shape
    ngram = methods.get("ngram")
    total = shape.budget + ngram.budget
    second = NgramDrafter(budget=ngram.budget, depth=ngram.depth)
    return UnionDrafter(drafter, second, total), replace(shape, budget=total)

"""Training state on disk: everything a run needs to go on bit for bit, in one file a step."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from slipstream.errors import CheckpointError


class HasState(Protocol):
    """An optimizer, or what was gathered of one."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers by parameter under "state"."""


KEEP = 2
"""Newest states kept; the one before the last survives a kill while the last is written."""


def save_state(
    folder: Path, step: int, model: nn.Module, optimizers: Sequence[HasState], extra: dict
) -> Path:
    """Write `state-STEP.safetensors` atomically and drop old ones.

    Args:
        folder: of the run.
        step: optimizer steps done.
        model: float32 master weights.
        optimizers: their tensors are stored by name, their numbers as JSON metadata.
        extra: JSON values to give back on resume.
    """
    tensors: dict[str, Tensor] = {
        f"model.{name}": parameter.detach().contiguous()
        for name, parameter in model.state_dict().items()
    }
    numbers: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        for item, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                key = f"optimizer.{number}.{item}.{name}"
                if isinstance(value, Tensor):
                    tensors[key] = value.detach().clone().contiguous()
                else:
                    numbers[key] = value
    path = folder / f"state-{step:08d}.safetensors"
    temporary = path.with_suffix(".partial")
    record = json.dumps({"step": step, "extra": extra, "numbers": numbers})
    save_file(tensors, temporary, metadata={"slipstream": record})
    temporary.replace(path)
    for old in states(folder)[:-KEEP]:
        old.unlink()
    return path


def states(folder: Path) -> list[Path]:
    """State files of a run, oldest first."""
    return sorted(folder.glob("state-*.safetensors"))


def load_state(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Restore a state in place and return `{"step", "extra"}`.

    Raises:
        CheckpointError: the file is truncated, or belongs to another network or optimizer.
    """
    try:
        with safe_open(str(path), framework="pt") as stored:
            record = json.loads(stored.metadata()["slipstream"])
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a training state: {error}",
            hint="delete it to resume from the state before it",
        ) from error
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"{path} belongs to another network: {error}") from error
    for number, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Any]] = {}
        prefix = f"optimizer.{number}."
        for key, value in {**tensors, **record["numbers"]}.items():
            if key.startswith(prefix):
                item, name = key.removeprefix(prefix).split(".", 1)
                state.setdefault(int(item), {})[name] = value
        groups = optimizer.state_dict()["param_groups"]
        if state.keys() - set(range(sum(len(group["params"]) for group in groups))):
            raise CheckpointError(
                f"{path} belongs to another optimizer: it moves other parameters",
                hint="start anew in another --output",
            )
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    return {"step": record["step"], "extra": record["extra"]}


def provenance(**more: object) -> dict[str, object]:
    """Versions, command and revision, stored with every drafter."""
    names = ("slipstream", "torch", "transformers", "accelerate", "safetensors")
    return {
        "command": [_portable(argument) for argument in sys.argv],
        "versions": {"python": platform.python_version()} | {n: _version(n) for n in names},
        "revision": _revision(),
        "machine": platform.machine(),
    } | more


def _portable(argument: str) -> str:
    """An argument without the folders of this machine."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _revision() -> str | None:
    """Git revision of the checkout this package runs from, or None."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()

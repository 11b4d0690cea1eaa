"""Draft checkpoints by their Hugging Face id: ORG/NAME, or ORG/NAME@REVISION."""

from __future__ import annotations

import os
import re
from pathlib import Path

from slipstream.errors import CheckpointError

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
FILES = ("*.json", "*.safetensors", "pytorch_model.bin", "medusa_lm_head.*", "README.md")


def is_id(name: str) -> bool:
    """Whether a name can be an id: one slash, and no such place on this disk.

    Example:
        >>> is_id("org/drafter@v1"), is_id("./drafter"), is_id("drafter")
        (True, False, False)
    """
    found = _ID.fullmatch(name)
    return found is not None and not Path(found[1]).parent.exists()


def fetch(
    name: str, *, revision: str | None = None, token: str | None = None, is_offline: bool = False
) -> Path:
    """The folder of a checkpoint, downloaded once into Hugging Face's cache.

    Args:
        name: an id, possibly with a revision.
        revision: wins over one in the name.
        token: for private and gated repositories; None takes HF_TOKEN or the login.
        is_offline: take what the cache has; HF_HUB_OFFLINE says the same.

    Raises:
        CheckpointError: it cannot be had, with the reason.
    """
    from huggingface_hub import snapshot_download

    found = _ID.fullmatch(name)
    try:
        place = snapshot_download(
            found[1],
            revision=revision or found[2],
            token=token,
            allow_patterns=list(FILES),
            local_files_only=is_offline,
        )
    except Exception as error:  # offline, unknown, gated, no network: many classes
        said = " ".join(str(error).split())[:200]
        reason = said
        if is_offline:
            reason = "only local files are allowed and the cache lacks it"
        elif os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            reason = "HF_HUB_OFFLINE is set and the cache lacks it"
        raise CheckpointError(
            f"drafter '{name}' is no folder here, and Hugging Face does not give it: {reason}",
            f"check the name, or fetch it once with `hf download {found[1]}`",
        ) from error
    return Path(place)

"""Random EAGLE-3 checkpoints for the tiny model."""

from __future__ import annotations

import torch

from slipstream.formats.checkpoint import Eagle3Checkpoint
from slipstream.formats.layouts import EAGLE3
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.vocabulary import DraftVocabulary

NUM_IDS = 261  # 256 bytes and 5 special ids


def write_drafter(folder, *, vocab_size=NUM_IDS, hidden_size=48):
    """A random EAGLE-3 checkpoint of 200 draft ids."""
    torch.manual_seed(1)
    ids = torch.randperm(min(vocab_size, NUM_IDS))[:200].sort().values
    config = Eagle3Config(
        hidden_size, 64, 6, 2, 16, vocab_size, 200, (1, 2, 3), hidden_size, 1e-5, 1e4
    )
    checkpoint = Eagle3Checkpoint(Eagle3(config), DraftVocabulary(ids, vocab_size))
    EAGLE3.write(checkpoint, folder, dtype=torch.float32)
    return str(folder)

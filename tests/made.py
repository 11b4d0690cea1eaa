"""Tiny drafters of each network with random weights, and their folders in our own layout."""

from __future__ import annotations

import torch

from slipstream.formats.checkpoint import (
    DFlashCheckpoint,
    Eagle3Checkpoint,
    EagleCheckpoint,
    LanguageCheckpoint,
    MedusaCheckpoint,
    PEagleCheckpoint,
)
from slipstream.formats.layouts import DFLASH, EAGLE, EAGLE3, LANGUAGE, MEDUSA, PEAGLE
from slipstream.models.dflash import DFlash, DFlashConfig
from slipstream.models.eagle import Eagle, EagleConfig
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.language import Language, LanguageConfig
from slipstream.models.medusa import Medusa, MedusaConfig
from slipstream.models.peagle import PEagle, PEagleConfig
from slipstream.models.vocabulary import DraftVocabulary

V, U, D, L = 97, 40, 48, 8
TAPS = (2, 4, 5)  # the paper's for 8 layers


def vocabulary():
    return DraftVocabulary(torch.randperm(V)[:U].sort().values, V)


def random(model):
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.3)
    return model.eval()


def an_eagle3(**changes):
    config = Eagle3Config(D, 64, 6, 2, 16, V, U, TAPS, D, 1e-5, 5e5, **changes)
    return EAGLE3, Eagle3Checkpoint(random(Eagle3(config)), vocabulary())


def a_peagle(**changes):
    own = {"has_embedding": True, "num_layers": 2, "mask_token": 96}
    config = PEagleConfig(D, 64, 6, 2, 16, V, U, TAPS, D, 1e-5, 5e5, **own | changes)
    return PEAGLE, PEagleCheckpoint(random(PEagle(config)), vocabulary())


def an_eagle(**changes):
    model = random(Eagle(EagleConfig(D, 64, 6, 2, 16, V, U, **changes)))
    return EAGLE, EagleCheckpoint(model, vocabulary())


def heads(*, borrows=True):
    model = random(Medusa(MedusaConfig(D, 3, 2, V, U, borrows)))
    return MEDUSA, MedusaCheckpoint(model, vocabulary())


def a_dflash(**changes):
    config = DFlashConfig(D, 64, 6, 2, 16, 2, V, U, (1, 3, 5), D, 5, 96, **changes)
    return DFLASH, DFlashCheckpoint(random(DFlash(config)), vocabulary())


def a_dspark():
    return a_dflash(is_shifted=True, path_rank=8)


def a_language(**changes):
    config = LanguageConfig(D, 64, 2, 6, 2, 16, V, U, 1e-5, 5e5, **changes)
    return LANGUAGE, LanguageCheckpoint(random(Language(config)), vocabulary())


def stored(made, folder, **options):
    layout, checkpoint = made
    layout.write(checkpoint, folder, **{"dtype": torch.float32} | options)
    return folder

"""Five planted faults on the default model: `verify`'s default settings find each in minutes.

    python -m pytest -m full tests/full/test_full_faults.py -o log_cli=true -o log_cli_level=INFO

The log says how long each took.
"""

from __future__ import annotations

import inspect
import logging
import time

import pytest
from lab import MODEL

import slipstream
from planted import VERIFIERS, StaleCacheRow
from slipstream.bench.lossless import examine
from slipstream.cli.tasks import encode_tasks, read_texts, twin_of
from slipstream.cli.verify import _decodings, verify
from slipstream.engine.engine import Engine
from slipstream.verify.walk import walk

pytestmark = [pytest.mark.full, pytest.mark.real]

DEFAULT = {name: each.default for name, each in inspect.signature(verify).parameters.items()}
SECONDS = 300
LOG = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def setting():
    """The engine that `verify` examines by default, the prompts, and how they are answered."""
    engine = slipstream.load(MODEL, DEFAULT["method"])
    texts = read_texts(DEFAULT["tasks"], None, DEFAULT["limit"])
    encoded = encode_tasks(engine.target, texts, raw=False)
    ids = [prompt.ids for group in encoded.values() for prompt in group]
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    decodings = _decodings(*(DEFAULT[name] for name in names))
    return engine, ids, [decoding.arguments() for decoding in decodings]


def verified(setting, name, verify, *, target=None):
    """Examine the engine with a fault in it; fails when that takes too long."""
    engine, ids, arguments = setting
    faulty = Engine(target or engine.target, engine.drafter, verify)
    began = time.perf_counter()
    found = examine(faulty, ids, arguments, load_twin=twin_of(engine.target))
    seconds = time.perf_counter() - began
    LOG.info("%s: %s in %.0f s", name, found.verdict, seconds)
    assert seconds < SECONDS
    return found


def test_without_a_fault_nothing_is_found(setting):
    assert verified(setting, "no fault", walk).is_lossless


@pytest.mark.parametrize("fault", VERIFIERS, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_verifier_is_found(setting, fault):
    assert verified(setting, fault.__name__, fault).verdict == "different"


def test_a_stale_cache_row_is_found(setting):
    stale = StaleCacheRow(setting[0].target)
    assert verified(setting, "stale cache row", walk, target=stale).verdict == "different"

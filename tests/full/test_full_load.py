"""The long check of the server's loop: 40 mixed requests on the default model, ten more aborted.

They arrive at random while others run; each answer equals its own solo run, in float32.
"""

from __future__ import annotations

import queue
import random
import time

import pytest
from lab import MODEL

import slipstream
from slipstream.bench.tasks import read_task

pytestmark = [pytest.mark.full, pytest.mark.real]


def test_40_requests_equal_their_solo_runs_and_aborts_leak_nothing() -> None:
    chance = random.Random(0)
    engine = slipstream.load(MODEL, "eagle3", dtype="float32", max_length=1024)
    plain = slipstream.load(engine.target, "none", max_length=1024)
    prompts = [row.text for row in read_task("mt_bench")][:50]
    settings = [
        {
            "max_new_tokens": chance.randint(8, 64),
            "temperature": chance.choice([0.0, 0.7, 1.0]),
            "seed": chance.randrange(100),
        }
        for _ in prompts
    ]
    service = engine.serve(num_rows=6, max_waiting=64)
    doomed = set(chance.sample(range(50), 10))
    ended: queue.Queue = queue.Queue()
    for index, (prompt, options) in enumerate(zip(prompts, settings, strict=True)):
        request = engine.request(prompt, index, **options)
        service.submit(request, lambda piece: piece.result and ended.put(piece.result))
        time.sleep(chance.random() * 0.5)
        if index in doomed:
            service.abort(request)
    results = {r.prompt_index: r for r in (ended.get(timeout=600) for _ in prompts)}
    assert service.drain(10) and service.leaks() == ""
    service.close()
    assert {i for i, r in results.items() if r.finish_reason == "abort"} <= doomed
    for index in set(results) - doomed:
        alone = plain.generate(prompts[index], **settings[index])
        assert results[index].token_ids == alone.token_ids, index

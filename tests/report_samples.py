"""A bench result and a trace by hand, for tests of the report."""

from __future__ import annotations

import torch

from slipstream.report import trace
from slipstream.report.page import Span
from slipstream.types import DraftTree, Step, Verdict

ROW = {
    "task": "qa",
    "method": "eagle3",
    "temperature": 0.0,
    "num_rows": 1,
    "num_prompts": 4,
    "num_tokens": 404,
    "tau": 2.0,
    "tau_ci": [1.8, 2.2],
    "alpha": [0.6, 0.5],
    "reach": [0.6, 0.3],
    "decode_tokens_per_second": 20.0,
    "speedup": 1.5,
    "speedup_ci": [1.4, 1.6],
    "draft_seconds": 1.0,
    "target_seconds": 8.0,
    "other_seconds": 1.0,
    "identical": 4,
    "ties": 0,
    "different": 0,
    "prefill_latency": {"p50": 0.1, "p90": 0.2, "p99": 0.3},
    "token_latency": {"p50": 0.05, "p90": 0.06, "p99": 0.07},
    "lossless": True,
}
PLAIN = ROW | {"method": "none", "tau": 1.0, "alpha": [], "reach": [], "speedup": 1.0}


def bench(rows=(PLAIN, ROW), **changes) -> dict:
    environment = {
        "model": "m", "dtype": "float32", "num_threads": 2, "num_cores": 2, "cpu": "c",
        "platform": "p", "accelerator": None, "versions": {}, "revision": "r", "busy_share": 0.02,
    }  # fmt: skip
    return {
        "schema": 1,
        "kind": "slipstream bench",
        "environment": environment,
        "settings": {"max_new_tokens": 101},
        "prompts": [{"task": "qa", "num_prompts": 4}],
        "rows": [dict(row) for row in rows],
        "samples": [],
        "notes": [],
        **changes,
    }


def make_trace(text: str = "word") -> trace.Trace:
    """Two steps: one node of two accepted, then a tree without probabilities."""
    tree = DraftTree(
        torch.tensor([1, 2, 3]),
        torch.tensor([-1, 0, 0]),
        log_probs=torch.tensor([0.0, -0.5, -float("inf")]),
        is_drawn=torch.tensor([False, True, True]),
    )
    first = Step(
        tree,
        Verdict((0, 1), 4, is_bonus=True),
        (2, 4),
        0.1,
        0.2,
        0.3,
        target_log_probs=torch.tensor([0.0, -0.25, -3.0]),
        top_tokens=(((2, 0.7), (3, 0.2)),) * 3,
    )
    last = Step(DraftTree.chain([4]), Verdict((0,), 5), (5,))
    return trace.Trace(
        title=text,
        method=text,
        prompt=text,
        temperature=0.5,
        spans=(Span(text, False), Span(text, True, 0), Span(text, False, 0), Span("!", False, 1)),
        steps=(first, last),
        pieces=dict.fromkeys(range(1, 6), text),
    )

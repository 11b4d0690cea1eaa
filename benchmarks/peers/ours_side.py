"""Our own side of `run.py`: a variant is METHOD[+lookup] DTYPE."""

from __future__ import annotations

from typing import Any

from talk import Answer, serve

import slipstream
from slipstream.bench.specs import parse_spec


def make(job: dict[str, Any]) -> Answer:
    """An engine."""
    method, dtype = job["variant"].rsplit(" ", 1)
    spec = parse_spec(method)
    drafter = {"drafter": job["drafter"]} if spec.method == "eagle3" else {}
    engine = slipstream.load(
        job["name"], spec.method, dtype=dtype, threads=job["threads"], **drafter, **spec.settings
    )

    def answer(ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        said = engine.generate(ids, max_new_tokens=max_new_tokens)
        return {"tokens": said.token_ids, "passes": said.num_target_passes}

    return answer


if __name__ == "__main__":
    serve(make, "slipstream", "torch", "transformers")

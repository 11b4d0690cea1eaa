"""speculators' side of `validate.py`: runs in its environment and knows nothing of slipstream."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

NOT_STORED = ("verifier_norm.weight", "verifier_lm_head.weight", "embed_tokens.weight")


def main() -> None:
    """Load the export and draft a token after every position."""
    work = Path(sys.argv[1])
    import torch
    from safetensors.torch import load_file
    from speculators import SpeculatorModel

    model = SpeculatorModel.from_pretrained(work / "speculators", dtype=torch.float32).eval()
    stored = load_file(work / "speculators" / "model.safetensors")
    known = set(model.state_dict())
    given, drafted = load_file(work / "features.safetensors"), []
    for index in range(len(given) // 2):
        features, tokens = given[f"features.{index}"][None], given[f"tokens.{index}"][None]
        with torch.no_grad():
            said = model(features, tokens, torch.zeros_like(tokens), ttt_steps=1)
        ids = said[0][0]
        drafted.append((ids + model.d2t[ids]).tolist())
    result = {
        "drafted": drafted,
        "missing": sorted(known - set(stored) - set(NOT_STORED)),
        "unknown": sorted(set(stored) - known),
        "versions": {n: metadata.version(n) for n in ("speculators", "torch", "transformers")},
    }
    (work / "result-speculators.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()

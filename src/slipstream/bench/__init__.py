"""One ruler for every method: the same prompts, the same loop, interleaved, with intervals."""

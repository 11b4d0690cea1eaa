"""Which nodes to draft: scores in, `DraftTree` out, no networks."""

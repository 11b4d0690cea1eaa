"""Acceptance: (tree, logits, sampler, root position) to verdict, pure functions.

`walk` (any tree, any temperature) is the default. The rules for drawn nodes: `chain` ("token" on
the command line) and `block` for chains, `tree`, `kseq` and `traversal` for drawn siblings,
`hybrid` for chosen ones with a drawn one among them. `typical` is lossy. `law` enumerates what a
rule does exactly, `bound` says what no rule can exceed.
"""

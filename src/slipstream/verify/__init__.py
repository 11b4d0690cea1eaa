"""Lossless acceptance: (tree, logits, sampler, root position) to verdict, pure functions.

`walk` (chosen trees, any temperature) is the default; `chain` is Leviathan and Chen's rule for
drawn chains, called "token" on the command line. `law` enumerates what a rule does exactly.
"""

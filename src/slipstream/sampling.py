"""Logits to probabilities to token: one warp and one keyed noise for everything.

Keyed noise (Gumbel-max with a counter-based generator): g(seed, position, token) is standard
Gumbel noise that depends on nothing else, and the token at a position is the argmax of
log p + g. Plain decoding and `verify.walk` do the same arithmetic, so sampled speculative output
equals sampled plain output token for token, whatever was drafted (Daliri et al. 2024,
arXiv:2408.07978; arXiv:2506.05632).
"""

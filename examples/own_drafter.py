"""A drafter of your own: four methods and two attributes, and the output stays the target's.

This one knows that text likes to repeat its last word pairs: it remembers which token followed
each token in this answer, and drafts up to four tokens by following that map. Run it with

    python examples/own_drafter.py "Count from one to thirty in words."
"""

import sys
from itertools import pairwise

import slipstream
from slipstream import DraftTree


class Bigrams:
    """Drafts a chain from a map: token -> the token that followed it last."""

    name = "bigrams"
    taps = ()  # no hidden states of the target wanted

    def __init__(self, length=4):
        self.length = length
        self.maps = {}

    def open(self, row, features):
        """The prompt and the first token are known."""
        self.maps[row.key] = dict(pairwise(row.tokens))

    def propose(self, rows):
        """One tree per row; its root is the row's last token."""
        return [DraftTree.chain(self.chain(row)) for row in rows]

    def chain(self, row):
        """The root and what the map says, as long as there is room."""
        follows, chain = self.maps[row.key], [row.tokens[-1]]
        while len(chain) <= min(self.length, row.max_depth, row.max_nodes):
            if chain[-1] not in follows:
                break
            chain.append(follows[chain[-1]])
        return chain

    def observe(self, row, verdict, features):
        """The target has judged; row.tokens has grown."""
        new = row.tokens[-verdict.num_emitted - 1 :]  # the old root and what came after it
        self.maps[row.key].update(pairwise(new))

    def close(self, row):
        """The row is over."""
        self.maps.pop(row.key, None)


def main(prompt, model="smollm2-135m", num_tokens=128):
    """Answer plainly and with the drafter, and compare."""
    plain = slipstream.load(model, method="none")
    ours = slipstream.load(plain.target, drafter=Bigrams())
    expected = plain.generate(prompt, max_new_tokens=num_tokens)
    result = ours.generate(prompt, max_new_tokens=num_tokens)
    print(result.text)
    print(f"tokens per target pass: {result.tau:.2f}")
    print(f"same tokens as plain decoding: {result.token_ids == expected.token_ids}")
    return result.token_ids == expected.token_ids


if __name__ == "__main__":
    sys.exit(not main(" ".join(sys.argv[1:]) or "Count from one to thirty in words."))

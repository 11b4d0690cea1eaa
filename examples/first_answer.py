"""A real model answers plainly and with EAGLE-3: the same tokens, in fewer passes."""

import slipstream

prompt = "Name three animals that live in the sea."
engine = slipstream.load("smollm2-135m", method="eagle3")
plain = slipstream.load(engine.target, method="none")

fast, slow = (e.generate(prompt, max_new_tokens=64) for e in (engine, plain))
print(fast.text)
print(
    f"{fast.num_tokens} tokens, {slow.num_target_passes} passes plainly,",
    f"{fast.num_target_passes} with EAGLE-3",
)
print("same tokens:", fast.token_ids == slow.token_ids)

"""Toy chat templates and a byte-level tokenizer: every way a template can spoil a mask."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PLAIN = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TAGS_THE_TURN = (  # SmolLM3: header, empty thoughts and the newline after the turn lie in the tags
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}<|assistant|>"
    "<think>\n\n</think>\n{{ m['content'] }}<|end|>\n{% endgeneration %}"
    "{% else %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n\n</think>\n{% endif %}"
)
TAGS_THE_END = (  # the end of turn and what follows it lie in the tags
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|end|>\n{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPENS_THOUGHTS = PLAIN.replace(  # the prompt opens a block, an answer without thoughts closes it
    "<|{{ m['role'] }}|>",
    "<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}",
).replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}")
STAYS_IN_THOUGHTS = PLAIN.replace(  # the prompt opens a block, and answers know nothing of it
    "<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}"
)
STRIPS_THOUGHTS = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EMPTY_THOUGHTS = (  # the last answer gets a block; the prompt has one when thinking is off
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
OWN_BOS = "{{ bos_token }}" + PLAIN
CHINESE_ROLES = (
    "{% for m in messages %}{% if m['role'] == 'user' %}【用户】{% else %}【助手】{% endif %}"
    "{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}【助手】{% endif %}"
)
TEXT_MARKERS = (  # no special token ends a turn
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOOLS = (  # shows tools, calls and what they gave back, in the words of Hermes and Qwen
    "{% if tools %}<|system|>Call with <tool_call>."
    "{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|end|>\n{% endif %}"
    "{% for m in messages %}<|{{ 'user' if m['role'] == 'tool' else m['role'] }}|>"
    "{{ m['content'] }}{% for call in m['tool_calls'] or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DROPS_LAST_THOUGHT = STRIPS_THOUGHTS.replace("and not loop.last", "")


def byte_tokenizer(template, merges=()):
    """FX-BYTE: 256 byte ids and special tokens; every non-ASCII character spans several ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *(a + b for a, b in merges)]
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(pieces)}, list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"])
    bos = inner.token_to_id("<|bos|>")
    inner.post_processor = processors.TemplateProcessing(  # plain text gets a BOS, as in Llama
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|bos|>", eos_token="<|end|>", chat_template=template
    )

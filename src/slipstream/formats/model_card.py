"""The README of a draft checkpoint as Hugging Face's hub shows it: tags, then how to serve it.

A README that is there already keeps its words; it gets the tags if it has none.
"""

from __future__ import annotations

import re

from slipstream.formats.dialect import Dialect

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SERVED = {
    "vLLM": """vllm serve {target} --speculative-config \\
    '{{"method": {vllm}, "model": "{name}", "num_speculative_tokens": 3}}'""",
    "SGLang": """python -m sglang.launch_server --model-path {target} \\
    --speculative-algorithm {algorithm} --speculative-draft-model-path {name}""",
    "transformers": """from transformers import pipeline
print(pipeline("text-generation", "{target}", assistant_model="{name}")("..."))""",
}
_VLLM = {"peagle": '"eagle3", "parallel_drafting": true', "chain": '"draft_model"'}
"""What vLLM calls a method where it has another name for it."""
_SGLANG = {"chain": "STANDALONE"}
_TITLES = {
    "eagle": "EAGLE-1",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "medusa": "Medusa",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "chain": "Small",
}


def model_card(dialect: Dialect, *, name: str, target: str, readme: str | None = None) -> str:
    """README.md of a checkpoint.

    Args:
        dialect: it is written in.
        name: of the drafter, as people call it.
        target: what it serves; a Hugging Face id becomes the card's base model.
        readme: that it has already.

    Example:
        >>> from slipstream.formats.detect import dialect_for
        >>> print(model_card(dialect_for("vllm", "eagle3"), name="d", target="o/m")[:29])
        ---
        base_model: o/m
        library_n
    """
    text = _body(dialect, name, target) if readme is None else readme
    return text if text.startswith("---\n") else _front_matter(dialect, target) + text


def _front_matter(dialect: Dialect, target: str) -> str:
    """The block that the hub reads."""
    lines = ["---"]
    if _ID.fullmatch(target):
        lines.append(f"base_model: {target}")
    lines += [
        "library_name: slipstream",
        "pipeline_tag: text-generation",
        "tags:",
        "- speculative-decoding",
        f"- {dialect.method}",
        "---",
        "",
    ]
    return "\n".join(lines)


def _body(dialect: Dialect, name: str, target: str) -> str:
    """What to say where nobody has said anything."""
    title = _TITLES[dialect.method]
    lines = [
        f"# {name}",
        "",
        f"{title} draft network for `{target}`. Drafting never changes what the target says.",
        "",
        "```",
        f"slipstream generate --model {target} --method {dialect.method} --drafter {name} "
        '--prompt "..."',
    ]
    for engine, command in _SERVED.items():
        if engine in dialect.readers:
            filled = command.format(
                target=target,
                name=name,
                vllm=_VLLM.get(dialect.method, f'"{dialect.method}"'),
                algorithm=_SGLANG.get(dialect.method, dialect.method.upper()),
            )
            lines += ["", f"# {engine}", filled]
    lines += ["```", "", f"Files: the layout of {dialect.readers}.", ""]
    return "\n".join(lines)

"""What may be asked is told apart by its kind, and what is wrong throughout is told of once."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from slipstream.serve.schema import ChatAsked, CompletionAsked

TURN = {"role": "user", "content": "a"}
CHAT = {"messages": [TURN]}
MANY = 5000


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a", 1), (["a", "b"], 2), ([1, 2], 1), ([[1], [2, 3]], 2)],
)
def test_prompts_of_every_kind(prompt: object, count: int) -> None:
    asked = CompletionAsked(prompt=prompt, n=3)
    assert asked.prompt == prompt and asked.num_answers == 3 * count


@pytest.mark.parametrize("prompt", [[True, False], [1.0, 2.0], ["a", 1], [1, "a"], [[1], ["a"]], 5])
def test_what_is_no_prompt(prompt: object) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionAsked(prompt=prompt)
    assert caught.value.error_count() == 1


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (CompletionAsked, {"prompt": [-1] * MANY}),
        (CompletionAsked, {"prompt": [{}] * MANY}),
        (CompletionAsked, {"prompt": [[]] * MANY}),
        (CompletionAsked, {"prompt": ["", *[1] * MANY]}),
        (ChatAsked, CHAT | {f"x{n}": 1 for n in range(MANY)}),
        (ChatAsked, {"messages": [TURN | {f"x{n}": 1 for n in range(MANY)}]}),
        (ChatAsked, {"messages": [1] * MANY}),
        (ChatAsked, {"messages": [TURN | {"content": [1] * MANY}]}),
        (ChatAsked, {"messages": [{"role": "assistant", "tool_calls": [1] * MANY}]}),
        (ChatAsked, CHAT | {"stop": [""] * MANY}),
        (ChatAsked, CHAT | {"stop_token_ids": [-1] * MANY}),
        (ChatAsked, CHAT | {"logit_bias": {str(n): "x" for n in range(MANY)}}),
        (ChatAsked, CHAT | {"tools": [1] * MANY}),
    ],
)
def test_thousands_of_faults_are_told_of_once(schema: type, body: dict) -> None:
    """A body of megabytes would otherwise take minutes and gigabytes to refuse."""
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    assert caught.value.error_count() == 1


def test_which_answers_may_have_a_form() -> None:
    assert not ChatAsked(**CHAT).has_form
    assert not ChatAsked(**CHAT, response_format={"type": "text"}).has_form
    assert ChatAsked(**CHAT, response_format={"type": "json_object"}).has_form
    tool = {"type": "function", "function": {"name": "f"}}
    assert ChatAsked(**CHAT, tools=[tool]).has_form
    assert CompletionAsked(prompt="a", response_format={"type": "regex", "regex": "a"}).has_form

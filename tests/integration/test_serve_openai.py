"""The official client drives the server: streaming and not, sync and async."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator

import openai
import pytest

from serving import Running, plain_twin, running, tiny_engine

CHAT = [{"role": "user", "content": "abc abc abc"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(tiny_engine(), num_rows=4) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0)


def plain(served: Running, prompt: object, **options: object) -> object:
    return plain_twin(served.server.engine).generate(prompt, **options)


def test_a_chat_is_plain_decoding(served: Running, client: openai.OpenAI) -> None:
    for temperature, seed in ((0.0, 1), (1.0, 5), (1.0, 6)):
        expected = plain(served, CHAT, max_new_tokens=30, temperature=temperature, seed=seed)
        reply = client.chat.completions.create(
            model="tiny", messages=CHAT, max_completion_tokens=30, temperature=temperature,
            seed=seed,
        )  # fmt: skip
        choice = reply.choices[0]
        assert choice.message.content == expected.text and choice.message.role == "assistant"
        assert choice.finish_reason == expected.finish_reason
        assert reply.usage.prompt_tokens == len(expected.prompt_ids)
        assert reply.usage.completion_tokens == expected.num_tokens
        assert reply.usage.total_tokens == len(expected.prompt_ids) + expected.num_tokens
        assert reply.object == "chat.completion" and reply.model == "tiny"


def test_a_stream_joins_to_the_whole(client: openai.OpenAI) -> None:
    options = {
        "model": "tiny", "messages": CHAT, "max_tokens": 40, "temperature": 0.9, "seed": 3, "n": 3,
    }  # fmt: skip
    whole = client.chat.completions.create(**options)
    texts, finished, last = ["", "", ""], [None] * 3, None
    stream = client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **options
    )
    for chunk in stream:
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finished[choice.index] = choice.finish_reason or finished[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert finished == [choice.finish_reason for choice in whole.choices]
    assert last.choices == [] and last.usage == whole.usage
    assert len(set(texts)) > 1, "choices have seeds of their own"
    single = client.chat.completions.create(**(options | {"n": 1}))
    assert single.choices[0].message.content == texts[0]


def test_completions(served: Running, client: openai.OpenAI) -> None:
    inner = served.server.engine.tokenizer
    ids = inner.encode("abcd")
    asked = [("abcd", ["abcd"]), (ids, [ids]), (["abcd", "bcde"],) * 2, ([ids, ids],) * 2]
    for prompt, each in asked:
        reply = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
        expected = [plain(served, one, max_new_tokens=12, raw=True) for one in each]
        assert [choice.text for choice in reply.choices] == [result.text for result in expected]
        assert reply.usage.prompt_tokens == sum(len(result.prompt_ids) for result in expected)
    stream = client.completions.create(
        model="tiny", prompt="abcd", max_tokens=12, temperature=0, stream=True
    )
    assert (
        "".join(c.choices[0].text for c in stream)
        == plain(served, "abcd", max_new_tokens=12, raw=True).text
    )


def test_stop_strings_are_not_shown(client: openai.OpenAI) -> None:
    free = client.completions.create(model="tiny", prompt="ab", max_tokens=40, temperature=0)
    text = free.choices[0].text
    stop = text[4:6]
    expected = text[: text.find(stop)]
    for stream in (False, True):
        reply = client.completions.create(
            model="tiny", prompt="ab", max_tokens=40, temperature=0, stop=[stop, "~~"],
            stream=stream,
        )  # fmt: skip
        shown = "".join(c.choices[0].text for c in reply) if stream else reply.choices[0].text
        assert shown == expected


def test_logprobs_are_the_targets(served: Running, client: openai.OpenAI) -> None:
    """B131: of accepted and own tokens alike, streamed or not."""
    options = {
        "model": "tiny", "messages": CHAT, "max_tokens": 15, "temperature": 1.0, "seed": 2,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    reply = client.chat.completions.create(**options)
    target, tokenizer = served.server.engine.target, served.server.engine.tokenizer
    result = plain(served, CHAT, max_new_tokens=15, temperature=1.0, seed=2)
    content = reply.choices[0].logprobs.content
    assert len(content) == result.num_tokens
    for place, entry in enumerate(content):
        before = [*result.prompt_ids, *result.token_ids[:place]]
        log_probs = target.logits_of(before).log_softmax(-1)
        token = result.token_ids[place]
        assert entry.token == tokenizer.decode([token])
        assert entry.bytes == list(entry.token.encode())
        assert entry.logprob == pytest.approx(float(log_probs[token]), abs=1e-4)
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(
            log_probs.topk(2).values.tolist(), abs=1e-4
        )
    streamed = []
    for chunk in client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            streamed += choice.logprobs.content if choice.logprobs else []
    assert streamed == content
    old = client.completions.create(
        model="tiny", prompt="ab", max_tokens=5, temperature=0, logprobs=2
    ).choices[0]
    assert len(old.logprobs.tokens) == len(old.logprobs.token_logprobs) == 5
    assert old.logprobs.text_offset == [0, 1, 2, 3, 4]


def test_penalties_bias_and_min_p(served: Running, client: openai.OpenAI) -> None:
    from slipstream.engine.shaping import Penalties

    letter = served.server.engine.tokenizer.encode("g")[-1]
    reply = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=20, temperature=0.8, seed=1, presence_penalty=1.0,
        frequency_penalty=0.5, logit_bias={str(letter): -100},
        extra_body={"min_p": 0.05, "repetition_penalty": 1.1, "top_k": 20},
    )  # fmt: skip
    wish = Penalties(1.1, 1.0, 0.5, {letter: -100.0}, 0.05)
    expected = plain(
        served, CHAT, max_new_tokens=20, temperature=0.8, seed=1, top_k=20, penalties=wish
    )
    assert reply.choices[0].message.content == expected.text
    assert "g" not in expected.text


def test_speculation_is_told_and_can_be_off(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "messages": CHAT, "max_tokens": 60, "temperature": 0.0}
    fast = client.chat.completions.create(**options)
    told = fast.metrics["speculative_decoding"]
    assert told["num_spec_steps"] + told["num_accepted_draft_tokens"] <= (
        fast.usage.completion_tokens - 1
    ), "passes that drafted nothing are no steps of speculation"
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"]
    assert told["mean_acceptance_length"] == pytest.approx(
        1 + told["num_accepted_draft_tokens"] / told["num_spec_steps"]
    )
    assert told["mean_acceptance_length"] > 1.2 and told["num_spec_tokens"] == 8
    for off in ({"method": "none"}, {"budget": 0}):
        slow = client.chat.completions.create(**options, extra_body=off)
        assert slow.choices[0].message.content == fast.choices[0].message.content
        assert slow.metrics["speculative_decoding"] is None


def test_marks_tell_who_wrote_what(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=60, temperature=0, stream=True,
        extra_body={"mark_drafted": True},
    )  # fmt: skip
    text, spans = "", []
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            spans += getattr(choice, "marks", None) or []
    assert "".join(span[0] for span in spans) == text
    assert {span[1] for span in spans} == {True, False}


def test_json_and_regex_hold_with_speculation(served: Running, client: openai.OpenAI) -> None:
    """B133: legal, and the same with and without drafts."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    }
    forms = [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        {"type": "regex", "regex": "[0-9]{3}-[ab]{4}"},
    ]
    for form in forms:
        for temperature in (0.0, 1.0):
            options = {
                "model": "tiny", "messages": CHAT, "max_tokens": 120, "temperature": temperature,
                "seed": 4,
            }  # fmt: skip
            texts = [
                client.chat.completions.create(
                    **options, extra_body={"response_format": form, "method": method}
                )
                .choices[0]
                .message.content
                for method in ("ngram", "none")
            ]
            assert texts[0] == texts[1]
            if form["type"] == "regex":
                assert re.fullmatch(form["regex"], texts[0])
            else:
                assert 0 <= json.loads(texts[0])["a"] <= 99
    free = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=200, temperature=1.0, seed=1,
        response_format={"type": "json_object"},
    ).choices[0]  # fmt: skip
    assert free.message.content.lstrip().startswith("{")
    if free.finish_reason == "stop":
        json.loads(free.message.content)


def test_async_and_at_once(served: Running) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=20, temperature=1.0, seed=seed, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def everyone() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="-") as client:
            whole = await client.completions.create(model="tiny", prompt="ab", max_tokens=3)
            assert whole.choices[0].text
            return await asyncio.gather(*(ask(client, seed) for seed in range(12)))

    for seed, text in enumerate(asyncio.run(everyone())):
        assert text == plain(served, CHAT, max_new_tokens=20, temperature=1.0, seed=seed).text


def test_models_and_ids(served: Running, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    reply = client.chat.completions.with_raw_response.create(
        model="tiny", messages=CHAT, max_tokens=2
    )
    assert reply.headers["x-request-id"] == reply.parse().id


def test_a_model_is_found_by_its_name(client: openai.OpenAI) -> None:
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert caught.value.status_code == 404 and "is not served here" in str(caught.value)


def test_without_a_seed_no_two_answers_share_their_noise(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "max_tokens": 20, "temperature": 1.0}
    told = client.completions.create(prompt=["abc"] * 3, n=2, **options)
    assert len({choice.text for choice in told.choices}) == 6
    told = client.completions.create(prompt=["abc"] * 3, n=2, seed=5, **options)
    texts = [choice.text for choice in told.choices]
    assert texts[:2] == texts[2:4] == texts[4:] and texts[0] != texts[1]


def test_answers_come_back_as_token_ids(served: Running, client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="tiny", prompt="ab", max_tokens=200, temperature=0,
        extra_body={"return_token_ids": True, "skip_special_tokens": False},
    )  # fmt: skip
    expected = plain(served, "ab", max_new_tokens=200, raw=True)
    assert reply.choices[0].token_ids == list(expected.token_ids)


def test_our_own_training_can_ask_it(served: Running) -> None:
    from slipstream.data.server import ServerAnswerer

    engine = served.server.engine
    answerer = ServerAnswerer(served.url, engine.tokenizer, name="tiny", max_length=300)
    prompts = [engine.tokenizer.encode(text) for text in ("ab", "cde")]
    told = answerer.generate(prompts, max_new_tokens=10, temperature=0.0)
    expected = plain_twin(engine).generate(prompts, max_new_tokens=10)
    assert [one.token_ids for one in told] == [result.token_ids for result in expected]

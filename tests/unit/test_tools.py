"""Calls in a model's text: each dialect read whole and in pieces, and held to by a grammar."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from chats import PLAIN, byte_tokenizer
from slipstream.serve.tools import DIALECTS, Call, CallReader, dialect_of, rules, takes_tools

HERMES, MISTRAL, LLAMA = DIALECTS
ONE = '{"name": "f", "arguments": {"x": [1]}}'
TWO = '{"name": "g", "arguments": {}}'
CALLS = [Call("f", '{"x": [1]}'), Call("g", "{}")]
TEXTS = [
    (HERMES, "a < b", "a < b", []),
    (HERMES, f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>\n", "", CALLS),
    (HERMES, f"So: <tool_call>[{ONE}, {TWO}]</tool_call> done", "So: done", CALLS),
    (HERMES, f"<tool_call>{ONE}", "", CALLS[:1]),
    (HERMES, "<tool_call>no</tool_call>x", "<tool_call>no</tool_call>x", []),
    (HERMES, f"<tool_call>{ONE}{{</tool_call>", f"<tool_call>{ONE}{{</tool_call>", []),
    (MISTRAL, f"[TOOL_CALLS] [{ONE}, {TWO}]", "", CALLS),
    (MISTRAL, "[TOOL_CALLS] [1", "[TOOL_CALLS] [1", []),
    (LLAMA, ONE.replace("arguments", "parameters"), "", CALLS[:1]),
    (LLAMA, f"{ONE}; {TWO}".replace("arguments", "parameters"), "", CALLS),
    (LLAMA, '{"name": "h", "parameters": {}}', '{"name": "h", "parameters": {}}', []),
    (LLAMA, f"Call {TWO}", f"Call {TWO}", []),
    (LLAMA, " \n", " \n", []),
]


@pytest.mark.parametrize(("dialect", "text", "words", "calls"), TEXTS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reading_in_pieces_of_any_size(
    dialect: object, text: str, words: str, calls: list, size: int
) -> None:
    reader = CallReader(dialect, {"f", "g"})
    told, found = "", []
    for at in range(0, len(text), size):
        more, late = reader.push(text[at : at + size])
        told, found = told + more, found + late
    more, late = reader.finish()
    assert (told + more, found + late) == (words, calls)
    assert reader.num_calls == len(calls)


BARE_ONE, BARE_TWO = (call.replace("arguments", "parameters") for call in (ONE, TWO))
MARKED = f"<tool_call>\n{ONE}\n</tool_call>"
SPLITS = [
    (HERMES, f"{MARKED}\nI asked the clock  for you.\n", "I asked the clock  for you.\n", 1),
    (HERMES, f"So:\n{MARKED} \n<tool_call>{TWO}</tool_call>\n\n and so on ", "So:\nand so on ", 2),
    (HERMES, f"{MARKED} \n<tool_call>no</tool_call> x  y", "<tool_call>no</tool_call> x  y", 1),
    (HERMES, f"{MARKED}\n <tool_ca", "<tool_ca", 1),
    (HERMES, f"{MARKED}\n <tool_call> no", "<tool_call> no", 1),
    (HERMES, f"<tool_call>no</tool_call> {MARKED} \n", "<tool_call>no</tool_call> ", 1),
    (HERMES, f"a <<tool_call>{TWO}</tool_call></tool_call> b", "a <</tool_call> b", 1),
    (HERMES, f" <tool_call>[{ONE}, {TWO}]</tool_call>  b  <tool_call>{TWO}", " b  ", 3),
    (MISTRAL, f" a [TOOL [TOOL_CALLS] [{ONE}, {TWO}] ", " a [TOOL ", 2),
    (MISTRAL, f"[TOOL_CALLS] [{ONE}] and  so", f"[TOOL_CALLS] [{ONE}] and  so", 0),
    (LLAMA, f"\n {BARE_ONE};  {BARE_TWO} \n", "", 2),
    (LLAMA, f" {BARE_ONE} and  so ", f" {BARE_ONE} and  so ", 0),
    (LLAMA, f"  I  say {BARE_ONE} ", f"  I  say {BARE_ONE} ", 0),
]


def parts(dialect: object, pieces: list[str], most: int | None) -> tuple[str, list[Call]]:
    reader = CallReader(dialect, {"f", "g"}, most)
    told = [reader.push(piece) for piece in pieces] + [reader.finish()]
    return "".join(words for words, _ in told), [call for _, calls in told for call in calls]


@pytest.mark.parametrize("most", [None, 1, 2])
@pytest.mark.parametrize(("dialect", "text", "words", "num_calls"), SPLITS)
def test_how_a_text_is_split_changes_nothing(
    dialect: object, text: str, words: str, num_calls: int, most: int | None
) -> None:
    whole = parts(dialect, [text], most)
    if most is None:
        assert (whole[0], len(whole[1])) == (words, num_calls)
    assert len(whole[1]) == min(num_calls, most or num_calls)
    assert parts(dialect, [*text], most) == whole
    for at in range(len(text)):
        assert parts(dialect, [text[:at], text[at:]], most) == whole, at


def test_words_are_not_held_back_longer_than_needed() -> None:
    reader = CallReader(HERMES, {"f"})
    assert reader.push("hello <to")[0] == "hello "
    assert reader.push("day")[0] == "<today"


def test_calls_past_the_most_are_dropped() -> None:
    reader = CallReader(HERMES, {"f", "g"}, most=1)
    assert reader.push(f"<tool_call>[{TWO}, {ONE}]</tool_call>") == ("", CALLS[1:])
    assert reader.push(f"<tool_call>{ONE}</tool_call>") == ("", [])


def test_nothing_follows_the_last_call_that_is_told() -> None:
    reader = CallReader(HERMES, {"f"}, most=1)
    assert reader.push("<tool_call>no</tool_call>") == ("<tool_call>no</tool_call>", [])
    assert not reader.is_full
    assert reader.push(f"<tool_call>{ONE}</tool_call> I") == ("", CALLS[:1])
    assert reader.is_full
    assert reader.push(" called <tool_call>") == ("", []) and reader.finish() == ("", [])
    assert not CallReader(HERMES, {"f"}).is_full


def test_a_template_tells_its_dialect() -> None:
    assert not takes_tools("{{ toolset }} and mytools")
    assert dialect_of("call <tool_call> so") is HERMES and dialect_of("[TOOL_CALLS]") is MISTRAL
    assert dialect_of('{"name": name, "parameters": dictionary of') is LLAMA
    assert dialect_of("{{ tools }}") is None


@pytest.mark.parametrize(
    "template",
    [
        "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>",
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>",
        "as a list within <tool_call></tool_call> XML tags:\n<tool_calls>[{...}]</tool_calls>",
        "{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}",
    ],
    ids=["qwen3-coder", "glm", "apriel", "newer-mistral"],
)
def test_calls_that_are_no_json_between_known_marks_are_no_dialect(template: str) -> None:
    """Lines of those models' templates; a grammar would force words on them they never saw."""
    assert dialect_of(template) is None


@pytest.fixture(scope="module")
def vocabulary() -> tuple:
    tokenizer = byte_tokenizer(PLAIN)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    return tokenizer, from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=[end])


def is_legal(vocabulary: tuple, grammar: str, text: str) -> bool:
    tokenizer, words = vocabulary
    matcher = LLMatcher(words, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("dialect", DIALECTS, ids=["hermes", "mistral", "llama"])
@pytest.mark.parametrize("must", [True, False])
@pytest.mark.parametrize("token", [None, "<|user|>"])
def test_grammars(vocabulary: tuple, dialect: object, must: bool, token: str | None) -> None:
    """Of a tool whose schema refers to its own definitions; with a mark of text or of one token."""
    number = {"$defs": {"N": {"type": "integer"}}, "type": "object", "required": ["x"],
              "properties": {"x": {"$ref": "#/$defs/N"}}}  # fmt: skip
    if token is not None and not dialect.begin:
        token = None
    id_ = None if token is None else vocabulary[0].convert_tokens_to_ids(token)
    schemas = {"f": number, "g": {"type": "object"}}
    several = rules(dialect, schemas, must=must, most=None, token=id_)
    single = rules(dialect, schemas, must=must, most=1, token=id_)

    def written(*calls: str) -> str:
        told = [call.replace("arguments", dialect.arguments) for call in calls]
        begin = token or dialect.begin
        if dialect.in_list:
            return f"{begin}[{', '.join(told)}]"
        return "\n".join(f"{begin}{call}{dialect.end}" for call in told)

    good, bad = '{"name": "f", "arguments": {"x": 3}}', '{"name": "f", "arguments": {"x": "a"}}'
    for grammar in (several, single):
        assert is_legal(vocabulary, grammar, written(good))
        assert is_legal(vocabulary, grammar, written(TWO))
        assert is_legal(vocabulary, grammar, "Well, no.") is not must
    assert not is_legal(vocabulary, several, written(bad))
    if dialect.begin:
        assert is_legal(vocabulary, several, written(good, TWO))
        assert is_legal(vocabulary, several, "Well. " + written(good)) is not must
    if dialect.begin and must:
        assert not is_legal(vocabulary, single, written(good, TWO))

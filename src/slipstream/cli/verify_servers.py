"""`slipstream verify --server`: what a server says, against our model or against another server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from slipstream.cli import options as o
from slipstream.cli.output import json_output, quiet_libraries
from slipstream.cli.progress import progress_bar
from slipstream.cli.tasks import encode_tasks, twin_of
from slipstream.errors import SettingError


@dataclass(frozen=True, slots=True)
class Compared:
    """What a server's answers are beside our model's.

    Args:
        report: a `LosslessReport`.
        num_retokenised: answers that came as text alone and were tokenised again.
    """

    report: Any
    num_retokenised: int


def verify_servers(
    server: str,
    against: str | None,
    setup: o.Setup,
    decodings: list[o.Decoding],
    texts: dict[str, list[Any]],
    *,
    raw: bool,
    json: bool,
) -> bool:
    """Compare and show; True when nothing but ties was found.

    Args:
        server: address of the server under test.
        against: address of a reference server; None takes our model.
        setup: our model.
        decodings: how to sample; two servers are compared greedily alone.
        texts: task to its prompts.
        raw: prompts are plain text.
        json: one JSON value instead of words.
    """
    with json_output(json) as writer, progress_bar("asking") as on_progress:
        quiet_libraries()
        where: dict[str, Any] = {"server": server, "against": against or setup.model}
        if against is None:
            found = _against_model(server, setup, decodings, texts, raw, on_progress)
            report = found.report
            where["num_retokenised"] = found.num_retokenised
        else:
            report = _against_server(server, against, decodings, texts, raw, on_progress)
        if json:
            writer.write(report.to_dict() | where)
    if not json:
        _show(report, where)
    return report.is_lossless


def _against_server(
    server: str,
    against: str,
    decodings: list[o.Decoding],
    texts: dict[str, list[Any]],
    raw: bool,
    on_progress: Any,
) -> Any:
    from slipstream.bench.servers import Server, compare

    greedy = [decoding for decoding in decodings if decoding.temperature == 0]
    if not greedy:
        raise SettingError(
            "temperature",
            decodings[0].temperature,
            "0 between two servers: what they would say at random is not known",
            "leave --against out to test sampled answers against the model itself",
        )
    asked = [prompt.first(raw=raw) for rows in texts.values() for _, prompt in rows]
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, len(asked))

    pair = Server(server), Server(against)
    return compare(*pair, asked, max_new_tokens=greedy[0].max_new_tokens, raw=raw, on_done=advance)


def _against_model(
    server: str,
    setup: o.Setup,
    decodings: list[o.Decoding],
    texts: dict[str, list[Any]],
    raw: bool,
    on_progress: Any,
) -> Compared:
    """Greedy answers token by token, sampled ones by a score test."""
    from slipstream.bench.lossless import joined
    from slipstream.data.server import ServerAnswerer

    plain = setup.load()
    target = plain.target
    ids = [p.ids for group in encode_tasks(target, texts, raw=raw).values() for p in group]
    asked = ServerAnswerer(
        server, target.tokenizer, name=target.spec.name, max_length=target.spec.max_length
    )
    reports = []
    for number, decoding in enumerate(decodings):
        how = _greedy if decoding.temperature == 0 else _sampled
        reports.append(how(asked, plain, ids, decoding))
        on_progress(number + 1, len(decodings))
    report = joined(reports)
    if asked.num_retokenised and report.verdict == "different":
        # A text has many tokenisations: the ids compared need not be those that were emitted.
        report = replace(report, verdict="inconclusive")
    return Compared(report, asked.num_retokenised)


def _greedy(asked: Any, plain: Any, ids: list[Any], decoding: o.Decoding) -> Any:
    from types import SimpleNamespace

    from slipstream.bench.equality import judge_for
    from slipstream.bench.lossless import answers, compare_answers
    from slipstream.types import Sampling

    arguments = decoding.arguments() | {"num_rows": 1}
    reference = answers(plain, ids, arguments)
    said = asked.generate(ids, **arguments)
    tokens = [answer.token_ids for answer in said]
    if asked.num_retokenised:
        decode = plain.target.tokenizer.decode
        tokens = [_ids_of(*pair, decode) for pair in zip(said, reference, strict=True)]
    served = [
        SimpleNamespace(token_ids=mine, finish_reason=a.finish_reason, num_target_passes=0)
        for mine, a in zip(tokens, said, strict=True)
    ]
    judge = judge_for(
        plain.target,
        Sampling(),
        load_twin=twin_of(plain.target),
        plain=lambda: (ids, [result.token_ids for result in reference]),
    )
    return compare_answers(ids, reference, served, judge)


def _ids_of(answer: Any, result: Any, decode: Callable[..., str]) -> Any:
    """A served answer's ids: plain decoding's where it is the same text and ends alike."""
    is_alike = (answer.finish_reason == "stop") == (result.finish_reason == "stop")
    is_same = is_alike and answer.text == decode(result.token_ids)
    return result.token_ids if is_same else answer.token_ids


def _sampled(asked: Any, plain: Any, ids: list[Any], decoding: o.Decoding) -> Any:
    from slipstream.bench.equality import is_reduced
    from slipstream.bench.lossless import LosslessReport
    from slipstream.bench.score import ScoreTest
    from slipstream.types import Sampling

    arguments = decoding.arguments()
    sampling = Sampling(decoding.temperature, decoding.top_k, decoding.top_p, decoding.seed)
    test, num_errors = ScoreTest(plain.target, sampling), 0
    for index, prompt in enumerate(ids):  # a seed each: equal ones would draw alike
        own = arguments | {"seed": decoding.seed + index, "num_rows": 1}
        (answer,) = asked.generate([prompt], **own)
        num_errors += answer.finish_reason == "error"
        test.add(prompt, answer.token_ids)
    score = test.report(is_exact=not is_reduced(plain.target.spec.dtype))
    return LosslessReport(
        verdict=score.verdict if not num_errors else "inconclusive",
        mode="score",
        num_prompts=len(ids),
        num_tokens=score.num_tokens,
        num_divergent=0,
        divergences=(),
        tau=None,
        tie_margin=None,
        num_errors=num_errors,
        score=score,
    )


def _show(report: Any, where: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from slipstream.cli.verify import show_score

    screen = Console(highlight=False)
    colour = "green" if report.is_lossless else "red"
    screen.print(
        f"[bold {colour}]{report.verdict}[/]: {where['server']} against {where['against']}, "
        f"{report.num_prompts} prompts, {report.num_tokens} tokens, {report.num_divergent} differ"
    )
    if count := where.get("num_retokenised"):
        screen.print(
            f"{count} answers came without token ids and were tokenised again: equal texts count "
            "as equal, what differs is not proven"
        )
    if getattr(report, "score", None) is not None:
        show_score(screen, report.score)
    if not report.divergences:
        return
    table = Table("prompt", "position", "margin", "reference", "server", "tie", box=None)
    for each in report.divergences:
        margin = "" if each.margin is None else f"{each.margin:.3g}"
        tokens = [repr(token) for token in (each.target_token, each.emitted_token)]
        numbers = str(each.prompt_index), str(each.position), margin
        table.add_row(*numbers, *tokens, "yes" if each.is_tie else "no")
    screen.print(table)
    if any(each.without_drafting for each in report.divergences):
        screen.print("some differ without drafting too: wide passes or batching alone cause them")

"""Features of supervised text: one causal pass of the target per text, to shards on disk."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.data.answers import read_settings, settings_path
from slipstream.data.conversations import Conversation, read_rows
from slipstream.data.hold import Hold
from slipstream.data.loops import loop_start
from slipstream.data.store import (
    Sample,
    StoreIndex,
    StoreWriter,
    bytes_per_token,
    check_room,
    is_before_index,
    read_index,
)
from slipstream.data.supervise import check_ids, supervise
from slipstream.errors import DataError, OutputError, SettingError
from slipstream.models.readout import Readout

ROWS_PER_SHARD = 64
TOKENS_PER_PASS = 2048


class FeatureSource(Protocol):
    """What extraction needs of a target; `target.hf.HFTarget` is one."""

    def extract(self, tokens: Tensor, taps: tuple[int, ...], lengths: Sequence[int]) -> object:
        """Features and last hidden of [B, T] right-padded texts."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text ready for extraction.

    Args:
        tokens: ids, prompt first.
        mask: True where the token is to be predicted.
        greedy: the supervised tokens are the target's own greedy choices.
    """

    tokens: list[int]
    mask: list[bool]
    greedy: bool


@dataclass(frozen=True, slots=True)
class Extraction:
    """What an extraction did: `rows`, `tokens`, `seconds`, `bytes`, and counts by reason."""

    path: Path
    rows: int
    tokens: int
    seconds: float
    bytes: int
    counts: dict[str, int]


def prepare(
    conversation: Conversation,
    tokenizer: object,
    *,
    max_length: int,
    max_prompt: int | None = None,
    loops: str = "cut",
    last_turn_only: bool = False,
    counts: Counter[str],
) -> Text | None:
    """Tokens and mask of one conversation, or None when it teaches nothing.

    Args:
        conversation: a row of the data file.
        tokenizer: the target's.
        max_length: longer texts are cut, and counted as `over_long`.
        max_prompt: texts whose first supervised token comes later are skipped.
        loops: `keep`, `cut` (from the second period of a repetition loop on) or `drop`.
        last_turn_only: learn from the last answer only.
        counts: reasons are added here.
    """
    made = supervise(conversation, tokenizer, max_length=max_length, last_turn_only=last_turn_only)
    tokens, mask = list(made.tokens), list(made.mask)
    if made.is_truncated:
        counts["over_long"] += 1
    if conversation.finish == "length":
        counts["truncated_answers"] += 1
    first = mask.index(True) if True in mask else None
    if first is None:
        counts["empty_masks"] += 1
        return None
    if max_prompt is not None and first > max_prompt:
        counts["long_prompts_skipped"] += 1
        return None
    loop = loop_start(tokens[first:])
    if loop is not None:
        counts["loops"] += 1
        if loops == "drop":
            return None
        if loops == "cut":
            tokens, mask = tokens[: first + loop], mask[: first + loop]
    own = conversation.response_ids is not None and not conversation.temperature
    own = own and not conversation.is_retokenised
    return Text(tokens, mask, greedy=own)


@dataclass(frozen=True, slots=True)
class Planned:
    """The texts of a data file, before the target has seen them.

    Args:
        path: the file.
        digest: SHA-256 of the file.
        texts: one per row, None where a row teaches nothing.
        counts: of what was skipped or cut, by reason.
        settings: how texts were made of rows.
    """

    path: Path
    digest: str
    texts: list[Text | None]
    counts: Counter[str]
    settings: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        """Tokens to take features of."""
        return sum(len(text.tokens) for text in self.texts if text)


def plan_texts(
    data: Path,
    tokenizer: object,
    *,
    max_length: int = 1024,
    max_prompt: int | None = None,
    limit: int | None = None,
    skip: int = 0,
    loops: str = "cut",
    last_turn_only: bool = False,
    shard: str | None = None,
    model: str | None = None,
) -> Planned:
    """Tokens and masks of a data file's rows.

    Args:
        data: JSONL file, any dialect.
        tokenizer: the target's.
        max_length: tokens of a text at most.
        max_prompt: skip texts with a longer prompt.
        limit: rows of the file at most, after `skip`.
        skip: rows of the file to leave out at its beginning (held out).
        loops: `keep`, `cut` or `drop`.
        last_turn_only: learn from the last answer of a row only.
        shard: "I/N" takes rows I, I+N, I+2N, ... of those.
        model: the target's name; None where any model's answers will do.

    Raises:
        SettingError: a shard that is not one.
        DataError: a row cannot be read, the file teaches nothing, or its tokens are of another
            model or template.
    """
    counts: Counter[str] = Counter()
    rows = list(_slice(read_rows(data), skip, limit))[shard_of(shard)]
    if any(row.is_tokenised for row in rows):
        _check_origin(Path(data), tokenizer, model)
    making = {"max_length": max_length, "max_prompt": max_prompt, "loops": loops}
    texts = [
        prepare(row, tokenizer, **making, last_turn_only=last_turn_only, counts=counts)
        for row in rows
    ]
    settings = making | {"skip": skip, "last_turn_only": last_turn_only, "shard": shard}
    settings["template"] = getattr(tokenizer, "fingerprint", None)
    settings["template_mode"] = dict(getattr(tokenizer, "template_mode", {}))
    digest = hashlib.sha256(Path(data).read_bytes()).hexdigest()
    planned = Planned(Path(data), digest, texts, counts, settings)
    if not planned.num_tokens:
        raise DataError(f"{data} has no supervised token in {len(rows)} rows", f"counts: {counts}")
    return planned


def _check_origin(data: Path, tokenizer: Any, model: str | None) -> None:
    """Raises DataError where rows with token ids were made for another model, template or mode.

    A model's name may be a path, which differs from one machine to the next; its end counts.
    """
    made = read_settings(data)
    ours = {
        "template": getattr(tokenizer, "fingerprint", None),
        "template_mode": dict(getattr(tokenizer, "template_mode", None) or {}),
        "model": model and Path(model).name.lower(),
    }
    theirs = made | {"model": Path(made.get("model") or "").name.lower()}
    for name, mine in ours.items():
        found = theirs.get(name)
        if mine is not None and found not in (None, "") and found != mine:
            raise DataError(
                f"{data} holds tokens made with {name.replace('_', ' ')} {made[name]}, this run "
                f"has {model if name == 'model' else mine}",
                "give the same --model and --thinking, or let this model answer the prompts; to "
                f"take the tokens as they are, delete {settings_path(data).name}",
            )


def shard_of(text: str | None) -> slice:
    """The rows that one of several machines takes.

    Raises:
        SettingError: the text is not "I/N" with 0 <= I < N.

    Example:
        >>> list(range(10))[shard_of("1/4")]
        [1, 5, 9]
    """
    if text is None:
        return slice(None)
    first, _, count = text.partition("/")
    if not (first.isdigit() and count.isdigit() and int(first) < int(count)):
        raise SettingError("shard", text, "I/N with I from 0 to N-1", "for example --shard 0/4")
    return slice(int(first), None, int(count))


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an extraction will take: texts and tokens left, exact bytes, seconds by a trial."""

    rows: int
    tokens: int
    bytes: int
    seconds: float


def extract_shards(
    target: FeatureSource,
    readout: Readout,
    data: Path,
    folder: Path,
    *,
    name: str,
    tokenizer: object,
    taps: tuple[int, ...],
    bits: int = 16,
    resume: bool = False,
    on_estimate: Callable[[Estimate], None] | None = None,
    on_progress: Callable[[int, int, int, float], None] | None = None,
    **making: Any,
) -> Extraction:
    """Write the features of a data file's supervised texts; resumes after a kill.

    Args:
        target: gives features.
        readout: its embedding and head, stored once.
        data: JSONL file, any dialect.
        folder: the store to make.
        name: the target's name, stored.
        tokenizer: the target's.
        taps: indices into the hidden states.
        bits: of a stored hidden value, 16 or 8.
        resume: go on in an existing folder.
        on_estimate: called once before the work, after the disk was found large enough.
        on_progress: called with rows done, rows planned, tokens done, seconds.
        **making: see `plan_texts`.

    Raises:
        OutputError: the folder exists and `resume` is off, another process is writing it, or the
            disk is too small.
        DataError: the file teaches nothing or holds ids that the target has not, or the folder
            was made from another file or with other settings (`limit` may change).
    """
    planned = plan_texts(data, tokenizer, model=name, **making)
    texts = planned.texts
    for text in texts:
        check_ids(text.tokens if text else (), readout.embedding.shape[0])
    folder.mkdir(parents=True, exist_ok=True)
    with Hold(folder):
        writer = _open_writer(folder, name, taps, readout, planned, bits, resume=resume)
        return _fill(
            writer, target, readout, planned, on_estimate=on_estimate, on_progress=on_progress
        )


def _fill(
    writer: StoreWriter,
    target: FeatureSource,
    readout: Readout,
    planned: Planned,
    *,
    on_estimate: Callable[[Estimate], None] | None,
    on_progress: Callable[[int, int, int, float], None] | None,
) -> Extraction:
    """Write what a store lacks; see `extract_shards`."""
    folder, texts, taps = writer.folder, planned.texts, tuple(writer.index.taps)
    writer.index.planned_rows = len(texts)
    left = [text for text in texts[writer.index.source_rows :] if text]
    num_tokens = sum(len(text.tokens) for text in left)
    size = num_tokens * bytes_per_token(len(taps), readout.embedding.shape[1], writer.index.bits)
    check_room(folder, size)
    if on_estimate and left:
        on_estimate(Estimate(len(left), num_tokens, size, _trial(target, left, taps)))
    writer.index.counts = dict(planned.counts)
    writer.write_counts((text.tokens, text.mask) for text in texts if text)
    started, tokens_done = time.perf_counter(), 0
    for start in range(writer.index.source_rows, len(texts), ROWS_PER_SHARD):
        chunk = [text for text in texts[start : start + ROWS_PER_SHARD] if text]
        samples = features_of(target, readout, chunk, taps)
        end = min(start + ROWS_PER_SHARD, len(texts))
        writer.append(samples, source_rows=end)
        tokens_done += sum(map(len, samples))
        if on_progress:
            on_progress(end, len(texts), tokens_done, time.perf_counter() - started)
    return Extraction(
        path=folder,
        rows=writer.index.num_rows,
        tokens=writer.index.num_tokens,
        seconds=time.perf_counter() - started,
        bytes=sum(path.stat().st_size for path in folder.iterdir()),
        counts=dict(planned.counts),
    )


def _trial(target: FeatureSource, texts: Sequence[Text], taps: tuple[int, ...]) -> float:
    """Seconds that all texts will take, by the pace of one of middling length."""
    middle = sorted(texts, key=lambda text: len(text.tokens))[len(texts) // 2]
    tokens, length = torch.tensor([middle.tokens]), len(middle.tokens)
    target.extract(tokens, taps, [length])  # the first pass is slower: hooks, buffers
    started = time.perf_counter()
    target.extract(tokens, taps, [length])
    pace = (time.perf_counter() - started) / length
    return pace * sum(len(text.tokens) for text in texts)


def features_of(
    target: FeatureSource, readout: Readout, texts: list[Text], taps: tuple[int, ...]
) -> list[Sample]:
    """Samples in the given order; passes are made of texts of similar length."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
    samples: dict[int, Sample] = {}
    while order:
        longest = len(texts[order[-1]].tokens)
        count = max(1, TOKENS_PER_PASS // longest)
        group, order = order[-count:], order[:-count]
        lengths = [len(texts[i].tokens) for i in group]
        tokens = torch.zeros(len(group), longest, dtype=torch.int64)
        for row, i in enumerate(group):
            tokens[row, : lengths[row]] = torch.tensor(texts[i].tokens)
        output = target.extract(tokens, taps, lengths)
        features = output.last_hidden[..., :0] if output.features is None else output.features
        for row, i in enumerate(group):
            here = slice(0, lengths[row])
            samples[i] = _sample(
                texts[i], features[row, here], output.last_hidden[row, here], readout
            )
    return [samples[i] for i in range(len(texts))]


def _sample(text: Text, features: Tensor, last_hidden: Tensor, readout: Readout) -> Sample:
    tokens = torch.tensor(text.tokens)
    mask = torch.tensor(text.mask)
    best = torch.zeros_like(tokens)
    wanted = torch.zeros_like(mask)
    wanted[:-1] = mask[1:]  # position t chooses token t + 1
    if text.greedy:
        best[:-1] = tokens[1:]
    else:
        best[wanted] = readout.logits(last_hidden[wanted]).argmax(-1).cpu()
    return Sample(tokens, mask, best, features.cpu(), last_hidden.cpu())


def _open_writer(
    folder: Path,
    name: str,
    taps: tuple[int, ...],
    readout: Readout,
    planned: Planned,
    bits: int,
    *,
    resume: bool,
) -> StoreWriter:
    digest, settings = planned.digest, planned.settings
    if (folder / "index.json").is_file():
        if not resume:
            raise OutputError(f"{folder} already holds features", "use --resume to go on in it")
        index = read_index(folder)
        if index.source_hash != digest or index.taps != list(taps):
            raise DataError(
                f"{folder} was made from another file or other taps ({index.taps})",
                hint="choose another --output",
            )
        before = {"target": index.target, "bits": index.bits} | index.settings
        for key, value in ({"target": name, "bits": bits} | settings).items():
            if before.get(key, value) != value:
                raise DataError(
                    f"{folder} was made with {key} {before[key]}, this run has {value}",
                    hint="resume with the same settings, or choose another --output",
                )
        return StoreWriter(folder, index)
    kept = [path.name for path in folder.iterdir()]
    if any(not resume or not is_before_index(file) for file in kept):
        raise OutputError(f"{folder} exists and is not empty", "choose another --output")
    vocab_size, hidden = readout.embedding.shape
    index = StoreIndex(
        name, list(taps), hidden, vocab_size, source_hash=digest, settings=settings, bits=bits
    )
    writer = StoreWriter(folder, index)
    writer.write_readout(readout)
    return writer


def _slice(rows: Iterator[Conversation], skip: int, limit: int | None) -> Iterator[Conversation]:
    for number, row in enumerate(rows):
        if limit is not None and number >= skip + limit:
            return
        if number >= skip:
            yield row

"""Conversations while they are being answered: what was said, and what is still to be asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.data.answers import AnswersFile
from slipstream.data.conversations import Conversation, Message


@dataclass(slots=True)
class Exchange:
    """A conversation being answered: what was said so far, and the user turns still to come."""

    row: Conversation
    said: list[Message]
    waiting: list[list[Message]]
    num_answers: int = 0

    @property
    def row_id(self) -> str:
        """Id of the answer that comes next."""
        return answer_id(self.row.id, self.num_answers + 1)


def answer_id(row_id: str, turn: int) -> str:
    """Id of the answer to a conversation's user turn, counted from 1.

    Example:
        >>> answer_id("x", 1), answer_id("x", 2)
        ('x', 'x:2')
    """
    return row_id if turn == 1 else f"{row_id}:{turn}"


def open_exchanges(
    rows: Sequence[Conversation],
    answers: AnswersFile,
    counts: Counter[str],
    *,
    keep_history: bool,
) -> list[Exchange]:
    """The conversations with turns left to answer, what is in the file taken over."""
    exchanges: dict[str, Exchange] = {}
    for row in rows:
        turns = _turns(row, keep_history=keep_history)
        if not turns:
            counts["no_user_turn"] += 1
            continue
        if row.id in exchanges:
            counts["duplicates_skipped"] += 1
            continue
        exchange = Exchange(row, [], turns)
        while exchange.waiting and exchange.row_id in answers:
            exchange.waiting.pop(0)
            exchange.num_answers += 1
        if not exchange.waiting:
            counts["already_there"] += 1
            continue
        if exchange.num_answers:
            last = answers.messages(answer_id(row.id, exchange.num_answers))
            exchange.said = [Message.from_dict(message) for message in last]
        exchanges[row.id] = exchange
    return list(exchanges.values())


def _turns(row: Conversation, *, keep_history: bool) -> list[list[Message]]:
    """What is added to the chat before each answer: a user turn and what stands before it."""
    if not row.messages and row.prompt_ids:
        return [[]]
    last_user = max((i for i, m in enumerate(row.messages) if m.role == "user"), default=None)
    if last_user is None:
        return []
    if keep_history:
        return [list(row.messages[: last_user + 1])]
    turns: list[list[Message]] = []
    pending: list[Message] = []
    for message in row.user_turns:
        pending.append(message)
        if message.role == "user":
            turns.append(pending)
            pending = []
    return turns

"""The HTTP side: what comes in is checked to the last field, what goes out has OpenAI's shape.

Nothing here touches the model. Requests go to the engine's loop through an `Exchange`; whatever is
wrong with a request is told as a 4xx that names it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from slipstream.engine.engine import Engine
from slipstream.engine.request import Request as Row
from slipstream.engine.shaping import FormError
from slipstream.errors import BusyError, PromptTooLongError, SettingError, SlipstreamError
from slipstream.serve.answering import Answer, Ask, ChatAnswer, CompletionAnswer
from slipstream.serve.exchange import DeadlineError, Exchange, GoneError
from slipstream.serve.metrics import Metrics, Watch
from slipstream.serve.replies import error_body
from slipstream.serve.schema import MOST_ANSWERS, ChatAsked, CompletionAsked

log = logging.getLogger("slipstream.serve")

BODY_SECONDS = 60.0  # for a client to send its body
SENDING_SECONDS = 5.0  # after the deadline, for a client to read what there is
HUNG_UP = 499
FORM_THREADS = 2  # rules of forms are compiled beside everything else
MOST_FORMS = 16  # requests whose rules are compiled or wait for it
FIELDS = {"biased token": "logit_bias"}
"""The engine's names of settings, where a body's field has another."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server allows.

    Args:
        num_rows: requests that decode together.
        max_waiting: requests that may wait for a row; more are sent away with 429.
        body_bytes: largest body.
        seconds: longest answer.
        drain_seconds: how long a shutdown waits for answers under way.
        pass_tokens: tokens of one decoding pass; see `Engine.serve`.
        prefill_tokens: prompt tokens between two steps; see `Engine.serve`.
        cache_tokens: tokens that all rows may hold; see `Engine.serve`.
    """

    num_rows: int = 8
    max_waiting: int = 64
    body_bytes: int = 4_000_000
    seconds: float = 600.0
    drain_seconds: float = 30.0
    pass_tokens: int | None = None
    prefill_tokens: int | None = None
    cache_tokens: int | None = None


class Refused(Exception):  # noqa: N818 - an answer, not a failure
    """An HTTP status other than 200, with what to tell."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param


class Server:
    """An engine behind HTTP; `app` is the ASGI application.

    Args:
        engine: answers; the server runs its loop.
        name: of the model, as clients ask for it.
        limits: what is allowed.
        api_keys: any of them opens `/v1`; none leaves it open.

    Raises:
        SettingError: an API key is empty, or a limit is outside its range.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str | None = None,
        limits: Limits | None = None,
        api_keys: Sequence[str] = (),
    ) -> None:
        if any(not key.strip() for key in api_keys):
            raise SettingError(
                "api-key",
                "empty",
                "a key that clients send",
                "set SLIPSTREAM_API_KEY to one, or unset it to leave /v1 open",
            )
        self.engine = engine
        self.limits = limits or Limits()
        self.name = name or engine.target.spec.name
        self.metrics = Metrics(self.name)
        self._keys = tuple(key.encode() for key in api_keys)
        self._created = int(time.time())
        self._compilers = ThreadPoolExecutor(FORM_THREADS, thread_name_prefix="slipstream-forms")
        self._num_forms = 0
        self.service = engine.serve(
            num_rows=self.limits.num_rows,
            max_waiting=self.limits.max_waiting,
            prefill_tokens=self.limits.prefill_tokens,
            pass_tokens=self.limits.pass_tokens,
            cache_tokens=self.limits.cache_tokens,
        )
        self.app = self._application()

    def _application(self) -> FastAPI:
        app = FastAPI(title="slipstream", docs_url=None, redoc_url=None, lifespan=self._lifespan)
        app.add_exception_handler(Refused, _tell_refusal)
        app.add_exception_handler(HTTPException, _tell_http)
        app.add_exception_handler(Exception, _tell_fault)
        get = {"methods": ["GET"]}
        app.add_api_route("/", self.page, **get, response_class=HTMLResponse)
        app.add_api_route("/health", self.health, **get)
        app.add_api_route("/metrics", self.prometheus, **get, response_class=PlainTextResponse)
        app.add_api_route("/v1/models", self.models, **get)
        app.add_api_route("/v1/models/{name:path}", self.model, **get)
        for path, handler, asked in (
            ("/v1/chat/completions", self.chat, ChatAsked),
            ("/v1/completions", self.completions, CompletionAsked),
        ):
            body = {"content": {"application/json": {"schema": _inlined(asked)}}, "required": True}
            app.add_api_route(path, handler, methods=["POST"], openapi_extra={"requestBody": body})
        return app

    @asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        """At the end, wait for answers under way; the HTTP server takes no more by then."""
        yield
        self._compilers.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.service.drain, self.limits.drain_seconds)
        await asyncio.to_thread(self.service.close)

    async def page(self) -> HTMLResponse:
        """The chat page: one file, no other address."""
        return HTMLResponse(files("slipstream.serve").joinpath("page.html").read_text("utf-8"))

    async def health(self) -> Response:
        """200 while requests are taken, else 503."""
        is_well = self.service.is_alive
        return JSONResponse({"status": "ok" if is_well else "stopping"}, 200 if is_well else 503)

    async def prometheus(self) -> PlainTextResponse:
        """Counters under vLLM's names."""
        gauges = {
            "num_requests_running": self.service.num_running,
            "num_requests_waiting": self.service.num_waiting,
            "kv_cache_usage_perc": self.service.cache_usage,
        }
        text = self.metrics.text(gauges, num_put_off=self.service.num_put_off)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> JSONResponse:
        """The one model, with what runs it."""
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request, name: str) -> JSONResponse:
        """The one model by its name."""
        self._check_key(request)
        self._check_name(name)
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        about = self.engine.describe()
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "slipstream",
            "max_model_len": self.engine.max_length,
            "method": about["method"],
            "budget": about.get("budget"),
        }

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        return await self._answer(request, ChatAsked, ChatAnswer)

    async def completions(self, request: Request) -> Response:
        """OpenAI's completions."""
        return await self._answer(request, CompletionAsked, CompletionAnswer)

    async def _answer(self, request: Request, schema: type, shape: type[Answer]) -> Response:
        begun, id_ = time.monotonic(), uuid.uuid4()
        request.state.id = f"{shape.prefix}-{id_.hex}"
        self._check_key(request)
        asked = _validated(schema, await _body(request, self.limits.body_bytes))
        self._check_served(asked)
        ask = Ask(self.engine, asked, id_)
        with self._busy_told():  # before a long prompt is tokenised for nothing
            self.service.check(asked.num_answers)
        rows = await self._rows(ask)
        answer = shape(ask, rows, self.name)
        exchange = Exchange(
            self.service,
            rows,
            seconds=self.limits.seconds,
            begun=begun,
            is_gone=request.is_disconnected,
            on_piece=Watch(self.metrics, answer.id, rows, begun).hear,
        )
        with self._busy_told():
            exchange.start()
        headers = {"X-Request-Id": answer.id}
        if asked.stream:
            return _Stream(_events(answer, rows, exchange.pieces()), exchange, headers=headers)
        try:
            async for index, piece in exchange.pieces():
                answer.add(index, piece)
        except DeadlineError as error:
            raise Refused(504, str(error), "timeout_error") from None
        except GoneError:
            return Response(status_code=HUNG_UP)
        finally:
            exchange.stop()
        for index, row in enumerate(rows):
            if (failure := answer.failure(index)) is not None:
                status, kind = _blame(row)
                form = "tools" if getattr(asked, "tools", None) else "response_format"
                raise Refused(status, failure, kind, form if status == 400 else None)
        return JSONResponse(answer.whole(), headers=headers)

    async def _rows(self, ask: Ask) -> list[Row]:
        """The engine's requests, made in a thread; those with a form wait for each other alone.

        Raises:
            Refused: the engine would not take them, too many forms wait, or it took too long.
        """
        has_form = ask.asked.has_form
        if has_form and self._num_forms >= MOST_FORMS:
            message = f"{self._num_forms} requests wait for their forms to be compiled"
            raise Refused(429, f"{message}; ask again later", "rate_limit_error")
        pool = self._compilers if has_form else None
        self._num_forms += has_form
        work = asyncio.get_running_loop().run_in_executor(pool, ask.rows)
        work.add_done_callback(lambda _work: self._form_done(has_form))
        try:
            async with asyncio.timeout(self.limits.seconds):
                return await _checked(work, type(ask.asked).model_fields)
        except TimeoutError:
            message = f"the answer was not begun after {self.limits.seconds:g} s"
            raise Refused(504, message, "timeout_error") from None

    def _form_done(self, has_form: bool) -> None:
        self._num_forms -= has_form

    @contextmanager
    def _busy_told(self) -> Iterator[None]:
        """A full queue is a 429, a shutdown a 503."""
        try:
            yield
        except BusyError as error:
            status = 429 if self.service.is_alive else 503
            raise Refused(status, _with_hint(error), "rate_limit_error") from None

    def _check_key(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if not self._keys:
            return
        fits = [secrets.compare_digest(given.strip().encode(), key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(fits):
            raise Refused(401, "missing or wrong API key", "authentication_error")

    def _check_name(self, name: str) -> None:
        if name != self.name:
            message = f"the model '{name[:200]}' is not served here, '{self.name}' is"
            raise Refused(404, message, "not_found_error", "model")

    def _check_served(self, asked: Any) -> None:
        if asked.model is not None:
            self._check_name(asked.model)
        most = min(MOST_ANSWERS, self.limits.num_rows + self.limits.max_waiting)
        if asked.num_answers > most:  # asking again would not help
            param = "n" if asked.n > 1 else "prompt"
            message = f"{asked.num_answers} answers in one request, at most {most} are given"
            raise Refused(400, message, "invalid_request_error", param)
        if asked.method not in (None, "none", self.engine.method):
            message = f"method '{asked.method[:200]}' is not served, {self.engine.method} or none"
            raise Refused(400, message, "invalid_request_error", "method")


class _Stream(StreamingResponse):
    """Server-sent events; however they end, the rows are given back.

    A client that does not read holds the sending up, so the answer's deadline is the sending's too.
    """

    def __init__(self, events: Any, exchange: Exchange, *, headers: Mapping[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=dict(headers))
        self._exchange = exchange

    async def __call__(self, *args: Any) -> None:
        try:
            async with asyncio.timeout(self._exchange.seconds_left + SENDING_SECONDS):
                await super().__call__(*args)
        except TimeoutError:
            log.warning("a client read its stream too slowly and was cut off")
        finally:
            self._exchange.stop()


async def _events(
    answer: Answer, rows: Sequence[Row], pieces: AsyncIterator[tuple[int, Any]]
) -> AsyncIterator[str]:
    """The answer's chunks as events; a choice's fault is told as one, the end always is."""
    try:
        for chunk in answer.opening():
            yield _event(chunk)
        async for index, piece in pieces:
            for chunk in answer.chunks(index, piece):
                yield _event(chunk)
            if (failure := answer.failure(index)) is not None:
                status, kind = _blame(rows[index])
                where = f"choices.{index}"
                yield _event(error_body(failure, kind, param=where, code=status))
        for chunk in answer.closing():
            yield _event(chunk)
    except DeadlineError as error:
        yield _event(error_body(str(error), "timeout_error", code=504))
    except GoneError:
        return
    yield "data: [DONE]\n\n"


def _event(chunk: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, allow_nan=False)}\n\n"


async def _body(request: Request, most: int) -> Any:
    """The JSON value of a body, read no further than `most` bytes.

    Raises:
        Refused: it is too large, too slow, not UTF-8 or not JSON.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > most:
                    raise Refused(
                        413, f"the body is larger than {most} bytes", "invalid_request_error"
                    )
        return json.loads(data.decode("utf-8"))
    except TimeoutError:
        raise Refused(408, "the body did not arrive in time", "timeout_error") from None
    except ClientDisconnect:
        raise Refused(HUNG_UP, "the client hung up", "invalid_request_error") from None
    except UnicodeDecodeError as error:
        raise Refused(400, f"the body is not UTF-8: {error}", "invalid_request_error") from None
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}", "invalid_request_error") from None


def _validated(schema: type, value: Any) -> Any:
    """The body as a schema's object.

    Raises:
        Refused: a field is unknown, missing, or outside its range; it is named.
    """
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        path = ".".join(str(part) for part in first["loc"]) or None
        message = first["msg"]
        if first["type"] == "extra_forbidden":
            message = "this field is not supported"
        told = f"{path or 'the body'}: {message}"[:1000]
        top = str(first["loc"][0]) if first["loc"] else None
        raise Refused(400, told, "invalid_request_error", top) from None


def _blame(row: Row) -> tuple[int, str]:
    """Status and kind of a choice that failed: the fault of its form, or ours."""
    if isinstance(row.failure, FormError):
        return 400, "invalid_request_error"
    return 500, "server_error"


async def _checked(rows: Awaitable[list[Row]], fields: Collection[str]) -> list[Row]:
    """The engine's requests, or its complaint as a 400 that names the field where it has one."""
    try:
        return await rows
    except SlipstreamError as error:
        name = getattr(error, "name", None)
        if isinstance(error, PromptTooLongError):
            name = "messages" if "messages" in fields else "prompt"
        name = FIELDS.get(name, name)
        param = name if name in fields else None
        raise Refused(400, _with_hint(error), "invalid_request_error", param) from None


def _with_hint(error: SlipstreamError) -> str:
    return f"{error}; {error.hint}" if error.hint else str(error)


def _inlined(schema: type) -> dict[str, Any]:
    """A schema without outside references, as an OpenAPI document can hold it in one place."""
    whole = schema.model_json_schema()
    definitions = whole.pop("$defs", {})

    def resolve(part: Any) -> Any:
        if isinstance(part, list):
            return [resolve(one) for one in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return resolve(definitions[part["$ref"].split("/")[-1]])
        return {key: resolve(value) for key, value in part.items() if key != "discriminator"}

    return resolve(whole)


async def _tell_refusal(request: Request, refused: Exception) -> JSONResponse:
    assert isinstance(refused, Refused)
    body = error_body(str(refused), refused.kind, param=refused.param, code=refused.status)
    headers = _id_of(request)
    if refused.status in (429, 503):
        headers["Retry-After"] = "1"
    param = refused.param and refused.param[:64]  # an unknown field may be named by megabytes
    told = {"status": refused.status, "param": param}  # what was asked stays unsaid
    log.info("%s", json.dumps({"id": headers.get("X-Request-Id")} | told))
    return JSONResponse(body, refused.status, headers)


async def _tell_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    body = error_body(str(error.detail), "invalid_request_error", code=error.status_code)
    return JSONResponse(body, error.status_code, dict(error.headers or {}) | _id_of(request))


async def _tell_fault(request: Request, error: Exception) -> JSONResponse:
    headers = _id_of(request)
    log.error("request %s failed", headers.get("X-Request-Id"), exc_info=error)
    body = error_body("internal error", "server_error", code=500)
    return JSONResponse(body, 500, headers)


def _id_of(request: Request) -> dict[str, str]:
    """The header that names a request, as far as it got."""
    id_ = getattr(request.state, "id", None)
    return {} if id_ is None else {"X-Request-Id": id_}

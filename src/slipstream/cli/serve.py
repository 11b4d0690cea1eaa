"""`slipstream serve`: an OpenAI-compatible server, here or by a distributed engine."""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream import assemble, methods
from slipstream.cli import options as o
from slipstream.cli.checks import DEFAULT_MODEL, check_at_least_one, check_name
from slipstream.cli.handover import hand_over, read_tuned
from slipstream.cli.output import tell
from slipstream.cli.tasks import refuse_idle
from slipstream.data.server import API_KEY
from slipstream.errors import SettingError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.serve.app import Server

ENGINES = ("slipstream", "vllm", "sglang")
OURS = (  # options that no other engine has in these words
    "max_waiting", "pass_tokens", "prefill_tokens", "cache_tokens", "max_body", "timeout", "drain",
    "verifier", "device", "threads",
)  # fmt: skip
ROWS = {"vllm": "--max-num-seqs", "sglang": "--max-running-requests"}
DTYPES = ("auto", "bfloat16", "float16", "float32")  # that the other engines have
STEADY = "walk"  # the rule whose noise is keyed: the others draw one number after another
CONTEXT = 4096  # tokens a row has room for unless told otherwise, if the model has as many


def serve(
    context: typer.Context,
    model: o.ModelOption = DEFAULT_MODEL,
    method: o.MethodOption = "eagle3",
    drafter: o.DrafterOption = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes any.")] = 8000,
    engine: Annotated[
        str,
        typer.Option("--engine", metavar="ENGINE", help=f"Who serves: {', '.join(ENGINES)}."),
    ] = "slipstream",
    output: Annotated[
        Path | None,
        typer.Option("--output", help="With another engine: export the drafter there now."),
    ] = None,
    start: Annotated[
        bool,
        typer.Option(
            "--start/--no-start", help="Run the other engine's command when all is in place."
        ),
    ] = True,
    tuned: Annotated[
        Path | None,
        typer.Option(
            "--tuned", metavar="FILE.json", help="Serve what `slipstream tune --output` chose."
        ),
    ] = None,
    served_name: Annotated[
        str | None, typer.Option("--served-name", metavar="NAME", help="What clients call it.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", envvar=API_KEY, help="Opens /v1; may be repeated."),
    ] = None,
    num_rows: Annotated[int, typer.Option("--num-rows", help="Requests that decode together.")] = 8,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", min=0, help="Requests that may queue; then 429.")
    ] = 64,
    max_length: Annotated[
        int | None,
        typer.Option("--max-length", help=f"Context of a request; {CONTEXT} or the model's."),
    ] = None,
    pass_tokens: Annotated[
        int | None,
        typer.Option("--pass-tokens", help="Tokens of one decoding pass at most; as many as pay."),
    ] = None,
    prefill_tokens: Annotated[
        int | None,
        typer.Option("--prefill-tokens", help="Prompt tokens between two steps of the others."),
    ] = None,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            "--cache-tokens", help="Tokens that all rows may hold; room for every row's longest."
        ),
    ] = None,
    max_body: Annotated[
        int, typer.Option("--max-body", help="Largest request, bytes.")
    ] = 4_000_000,
    timeout: Annotated[float, typer.Option("--timeout", help="Longest answer, seconds.")] = 600.0,
    drain: Annotated[
        float, typer.Option("--drain", help="Seconds a shutdown waits for answers.")
    ] = 30.0,
    tree: o.TreeOption = None,
    verifier: o.VerifierOption = None,
    budget: o.BudgetOption = None,
    depth: o.DepthOption = None,
    topk: o.ChildrenOption = None,
    width: o.WidthOption = None,
    lookup: o.LookupOption = False,
    dtype: o.DtypeOption = "auto",
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
) -> None:
    """Serve a model behind OpenAI's API, with a chat page at / and metrics at /metrics.

    Answers are plain decoding's whatever the load. With --engine vllm or sglang the equivalent
    command of that engine is printed; with --output the drafter is exported for it, and the engine
    is started if it is installed.
    """
    check_name("engine", engine, ENGINES)
    for name, value in (
        ("num-rows", num_rows),
        ("max-length", max_length),
        ("pass-tokens", pass_tokens),
        ("prefill-tokens", prefill_tokens),
        ("cache-tokens", cache_tokens),
        ("max-body", max_body),
    ):
        check_at_least_one(name, value)
    for name, seconds in (("timeout", timeout), ("drain", drain)):
        if not 0 < seconds < math.inf:
            raise SettingError(name, seconds, "above 0")
    keys = _keys(api_key)
    shape = {
        "method": method, "tree": tree, "budget": budget, "depth": depth, "topk": topk,
        "lookup": lookup,
    }  # fmt: skip
    chosen, lengths = ({}, {}) if tuned is None else read_tuned(tuned)
    if engine == "slipstream" and verifier is None:
        verifier = _verifier((shape | chosen)["method"])
    setup = o.Setup(
        model, drafter=drafter, verifier=verifier, dtype=dtype, device=device, threads=threads,
        width=width, **(shape | chosen),
    )  # fmt: skip
    if engine != "slipstream":
        refuse_idle(context, OURS, f"with --engine {engine}")
        words = _flags(engine, setup, served_name, context)
        if len(keys) > 1:
            raise SettingError("api-key", f"given {len(keys)} times", f"once: {engine} has one")
        hand_over(
            engine, setup, output, lengths=lengths, start=start, words=words,
            key=keys[0] if keys else None, host=host, port=port, max_length=max_length,
        )  # fmt: skip
        return
    if output is not None:
        raise SettingError("output", output, "nothing here", "it goes with --engine vllm or sglang")
    _check_installed()
    if (rule := setup.rule()) != STEADY:
        tell(
            f"note: with verifier {rule} an answer above temperature 0 depends on the load too; "
            f"leave --verifier out for {STEADY}, with which it depends on its seed alone"
        )
    listener = socket.create_server((host, port), family=_family(host))
    loaded = setup.load(max_length=max_length)
    if max_length is None:
        loaded.max_length = min(loaded.max_length, CONTEXT)
    from slipstream.serve.app import Limits, Server

    limits = Limits(
        num_rows, max_waiting, max_body, timeout, drain, pass_tokens, prefill_tokens, cache_tokens
    )
    server = Server(loaded, name=served_name, limits=limits, api_keys=keys)
    _run(server, listener, host)


def _verifier(method: str) -> str | None:
    """The rule that makes an answer depend on its seed alone, whatever the method's default."""
    return STEADY if STEADY in methods.get(method).verifiers else None


def _keys(given: list[str] | None) -> tuple[str, ...]:
    """The keys that open /v1.

    Raises:
        SettingError: one is empty, or the variable is set to nothing: whoever sets it wants a key.
    """
    found = (os.environ.get(API_KEY, "unset"),) if not given else tuple(given)
    if not all(key.strip() for key in found):
        raise SettingError(
            "api-key", "empty", "a key that clients send", f"give one, or unset {API_KEY}"
        )
    return tuple(given or ())


def _flags(
    engine: str, setup: o.Setup, served_name: str | None, context: typer.Context
) -> tuple[str, ...]:
    """Name, rows and dtype in another engine's words.

    Raises:
        SettingError: it cannot express the dtype or the budget.
    """
    if setup.dtype not in DTYPES:
        raise SettingError(
            "dtype", setup.dtype, f"{', '.join(DTYPES)} with --engine {engine}",
            "name a model that is quantised for it, or leave --dtype out",
        )  # fmt: skip
    if setup.budget == assemble.AUTO:
        raise SettingError("budget", setup.budget, f"a number with --engine {engine}")
    words = () if served_name is None else ("--served-model-name", served_name)
    if setup.dtype != "auto":
        words += ("--dtype", setup.dtype)
    source = context.get_parameter_source("num_rows")
    if source is not None and source.name == "COMMANDLINE":
        words += (ROWS[engine], str(context.params["num_rows"]))
    return words


def _run(server: Server, listener: socket.socket, host: str) -> None:
    """Serve until a signal comes, then drain. A log that cannot be written does not stop it."""
    import logging

    import uvicorn

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("slipstream")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    about = server.engine.describe()
    tell(
        f"{server.name} with {about['method']} at http://{shown}:{port} "
        f"(page; API under /v1, metrics at /metrics)"
    )
    config = uvicorn.Config(
        server.app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(server.limits.drain_seconds),
    )
    uvicorn.Server(config).run(sockets=[listener])


def _check_installed() -> None:
    """Raises SlipstreamError when the server's packages are missing."""
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "llguidance") if find_spec(name) is None]
    if missing:
        raise SlipstreamError(
            f"the server needs {', '.join(missing)}, which is not installed",
            "pip install -e '.[serve]', in a clone of the project",
        )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET

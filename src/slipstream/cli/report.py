"""`slipstream report`: results and traces as one HTML page that opens offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import options as o
from slipstream.cli.checks import check_output_file
from slipstream.cli.output import console, json_output

ResultsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="RESULTS...",
        help="Files of `bench --output`, `tune --output`, and `--trace` of bench or generate.",
    ),
]


def report(
    results: ResultsArgument,
    output: Annotated[Path, typer.Option("--output", metavar="PAGE.html", help="The page.")] = Path(
        "slipstream-report.html"
    ),
    title: Annotated[str, typer.Option("--title", help="Its heading.")] = "What was measured",
    json: o.JsonOption = False,
) -> None:
    """Put results on one page: tables, figures with intervals, and decodings step by step.

    The page loads nothing from anywhere. Figures can be saved from it as SVG and PNG.
    """
    from slipstream.report import MARK

    check_output_file(output, own_mark=MARK)
    with json_output(json) as writer:
        from slipstream.report.page import write_page
        from slipstream.report.results_page import read_sources, render

        write_page(output, render(read_sources(results), title=title))
        if json:
            writer.write({"page": str(output.resolve())})
        else:
            console().print(f"written: {output} (opens in any browser, offline)", markup=False)

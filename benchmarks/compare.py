"""Two bench results that exist already against each other.

    python benchmarks/compare.py OLD.json NEW.json                # exit 1 when anything is worse
    python benchmarks/compare.py OLD.json NEW.json --tolerance 0.1

The same comparison as `slipstream bench --against OLD.json`, without measuring.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slipstream.bench.against import TOLERANCE, compare
from slipstream.bench.results import read
from slipstream.cli.bench_tables import show_comparison
from slipstream.cli.main import exit_status


def main(arguments: list[str] | None = None) -> int:
    """Print the comparison; 0 when nothing is worse, 1 when something is, 2 for wrong input."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    given = parser.parse_args(arguments)

    def told() -> int:
        found = compare(read(given.old), read(given.new), tolerance=given.tolerance)
        show_comparison(found, given.old)
        return int(found.is_worse)

    return exit_status(told)


if __name__ == "__main__":
    sys.exit(main())

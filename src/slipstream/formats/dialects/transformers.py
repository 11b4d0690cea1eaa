"""A small draft language model as a whole Llama, which any engine loads as it loads a model.

`transformers` takes it as `assistant_model`, vLLM as `draft_model`, SGLang as STANDALONE. Our
network borrows the target's embedding and says some of its ids; here the embedding is a copy, and
the head has a row for every id. An id that the drafter does not know gets the mean of the rows it
knows: its logit is the mean of the known ones', so it is never the most likely token. Which ids
those are is told by `slipstream.unknown_id`, the first of them: all have the same row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.formats import folder
from slipstream.formats.checkpoint import Files, LanguageCheckpoint, TargetFacts, take_copy
from slipstream.formats.dialect import Dialect
from slipstream.formats.sizes import read_sizes, write_sizes
from slipstream.models.language import Language, LanguageConfig
from slipstream.models.vocabulary import DraftVocabulary

ARCHITECTURE = "LlamaForCausalLM"
HEAD = "lm_head.weight"


def claim(files: Files) -> str | None:
    """By our own words in its config: without them it is a model like any other."""
    own = files.config.get("slipstream") or {}
    if ARCHITECTURE in (files.config.get("architectures") or ()) and own.get("method") == "chain":
        return f"architecture {ARCHITECTURE} and slipstream.method chain"
    return None


def load(files: Files, target: TargetFacts | None) -> LanguageCheckpoint:
    """Layers and the head's rows of the ids it knows.

    Raises:
        CheckpointError: unknown or missing tensors, or an embedding that is not the target's.
    """
    tensors = {name.removeprefix("model."): tensor for name, tensor in files.tensors.items()}
    sizes = read_sizes(files.config, files.place)
    take_copy(
        tensors,
        "embed_tokens.weight",
        None if target is None else target.embedding,
        rows=None,
        of="embedding",
    )
    known = torch.arange(sizes["vocab_size"])
    unknown, head = files.config["slipstream"].get("unknown_id"), tensors.get(HEAD)
    if unknown is not None and head is not None:
        known = (head != head[unknown]).any(dim=1).nonzero()[:, 0]
        tensors[HEAD] = head[known]
    vocabulary = DraftVocabulary(known, sizes["vocab_size"])
    model = Language(LanguageConfig(**{**sizes, "draft_vocab_size": len(known)}))
    folder.fill(model, tensors, files.place)
    return LanguageCheckpoint(model.eval(), vocabulary)


def dump(checkpoint: LanguageCheckpoint, target: TargetFacts, dtype: torch.dtype) -> Files:
    """Files of a Llama with the target's embedding.

    Raises:
        CheckpointError: that embedding is not at hand.
    """
    if target.embedding is None:
        raise CheckpointError("a whole model holds the target's embedding, which was not given")
    vocabulary = checkpoint.vocabulary
    tensors = folder.to_tensors(checkpoint.model, None, dtype)
    tensors = {
        name if name == HEAD else f"model.{name}": tensor for name, tensor in tensors.items()
    }
    tensors["model.embed_tokens.weight"] = target.embedding.to("cpu", dtype).contiguous()
    tensors[HEAD] = _whole(tensors[HEAD], vocabulary)
    unknown = (~vocabulary.mask()).nonzero()
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **write_sizes(checkpoint.model.config, dtype),
        "slipstream": {
            "method": "chain",
            "unknown_id": int(unknown[0]) if len(unknown) else None,
        },
    }
    return Files(config, tensors)


def _whole(head: Tensor, vocabulary: DraftVocabulary) -> Tensor:
    """[V, D] of [U, D]: rows that are not there are the mean of those that are."""
    rows = head.float().mean(dim=0).to(head.dtype).repeat(vocabulary.target_size, 1)
    rows[vocabulary.target_ids] = head
    return rows


CHAIN = Dialect(
    "transformers",
    "chain",
    "transformers, vLLM, SGLang, OpenVINO",
    claim,
    load,
    dump,
    is_model=True,
)

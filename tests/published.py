"""Tiny checkpoints spelled as each project publishes them, from nothing but names and numbers.

Nothing here uses the package's own writers, so that reading them proves something. All are for a
target of 97 ids, width 48 and 8 layers; heads are grouped and of a size that is not derived.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

V, U, D, WIDE, H, HKV, C, L = 97, 40, 48, 64, 6, 2, 16, 8
LLAMA = {
    "hidden_act": "silu",
    "hidden_size": D,
    "intermediate_size": WIDE,
    "num_attention_heads": H,
    "num_key_value_heads": HKV,
    "head_dim": C,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def rand(*shape: int) -> torch.Tensor:
    """Weights of a size that gives logits of a few units."""
    return torch.randn(*shape) * 0.3


def maps() -> dict[str, torch.Tensor]:
    """`d2t` and `t2d` of 40 random ids: offsets and a mask."""
    ids = torch.randperm(V)[:U].sort().values
    mask = torch.zeros(V, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(U), "t2d": mask}


def unknown(kept: torch.Tensor) -> torch.Tensor:
    """Ids of the target that are not among these."""
    mask = torch.ones(V, dtype=torch.bool)
    mask[kept] = False
    return mask.nonzero()[:, 0]


def layer(prefix: str, width: int, *, bias: bool = False) -> dict[str, torch.Tensor]:
    """One Llama layer whose attention reads `width` values, without a norm before it."""
    sizes = {"q_proj": H * C, "k_proj": HKV * C, "v_proj": HKV * C}
    found = {f"{prefix}self_attn.{n}.weight": rand(s, width) for n, s in sizes.items()}
    if bias:
        found |= {f"{prefix}self_attn.{n}.bias": rand(s) for n, s in sizes.items()}
    return found | {
        f"{prefix}self_attn.o_proj.weight": rand(D, H * C),
        f"{prefix}mlp.gate_proj.weight": rand(WIDE, D),
        f"{prefix}mlp.up_proj.weight": rand(WIDE, D),
        f"{prefix}mlp.down_proj.weight": rand(D, WIDE),
        f"{prefix}post_attention_layernorm.weight": 1 + rand(D),
    }


def eagle3(prefix: str = "midlayer.", num_taps: int = 3, *, bias: bool = False) -> dict:
    """Tensors of EAGLE-3, reduced vocabulary."""
    return {
        "fc.weight": rand(D, num_taps * D),
        **layer(prefix, 2 * D, bias=bias),
        f"{prefix}hidden_norm.weight": 1 + rand(D),
        f"{prefix}input_layernorm.weight": 1 + rand(D),
        "norm.weight": 1 + rand(D),
        "lm_head.weight": rand(U, D),
        **maps(),
    }


def peagle(num_layers: int = 3, *, bias: bool = False) -> dict:
    """Tensors of P-EAGLE: EAGLE-3's, an embedding of its own, layers above, what slots read."""
    found = eagle3("layers.0.", bias=bias)
    for index in range(1, num_layers):
        found |= layer(f"layers.{index}.", D, bias=bias)
        found[f"layers.{index}.input_layernorm.weight"] = 1 + rand(D)
    return found | {"embed_tokens.weight": rand(V, D), "mask_hidden": rand(1, 1, 3 * D)}


def eagle(*, bias: bool = True, qkv_bias: bool = False) -> dict:
    """Tensors of EAGLE-1."""
    found = {"fc.weight": rand(D, 2 * D), **layer("layers.0.", D, bias=qkv_bias)}
    return found | ({"fc.bias": rand(D)} if bias else {})


def dflash(num_layers: int = 2, num_taps: int = 5) -> dict:
    """Tensors of DFlash."""
    found = {
        "fc.weight": rand(D, num_taps * D),
        "hidden_norm.weight": 1 + rand(D),
        "norm.weight": 1 + rand(D),
    }
    for index in range(num_layers):
        prefix = f"layers.{index}."
        found |= layer(prefix, D)
        found |= {
            f"{prefix}input_layernorm.weight": 1 + rand(D),
            f"{prefix}self_attn.q_norm.weight": 1 + rand(C),
            f"{prefix}self_attn.k_norm.weight": 1 + rand(C),
        }
    return found


def medusa(num_heads: int = 3, num_blocks: int = 1) -> dict:
    """The authors' heads."""
    found = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            found[f"{head}.{block}.linear.weight"] = rand(D, D)
            found[f"{head}.{block}.linear.bias"] = rand(D)
        found[f"{head}.{num_blocks}.weight"] = rand(V, D)
    return found


def speculators(kind: str, model_type: str, num_layers: int = 1) -> dict:
    """The schema that all of speculators' algorithms share; transformers 5 spells RoPE so."""
    rope = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": LLAMA
        | {"model_type": model_type, "num_hidden_layers": num_layers, **rope},
        "draft_vocab_size": U,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
    }


def markov(rows: int = V) -> dict:
    """DSpark's vanilla head and its confidence head."""
    return {
        "markov_head.markov_w1.weight": rand(V, 8),
        "markov_head.markov_w2.weight": rand(rows, 8),
    }


def publish(name: str, embedding: torch.Tensor, head: torch.Tensor) -> tuple[dict, dict, str]:
    """config.json, tensors and the weights' file of a published layout.

    Args:
        name: one of `LAYOUTS`.
        embedding: [V, D], the target's.
        head: [V, D], the target's.
    """
    blocks = LLAMA | {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "num_target_layers": L, "attention_bias": False,
    }  # fmt: skip
    ids = [1, 2, 3, 4, 5]
    reduced = {"draft_vocab_size": U}
    rows = maps()
    kept = torch.arange(U) + rows["d2t"]
    file = "model.safetensors"
    match name:
        case "eagle/eagle3":  # no RoPE base, no ids
            config = LLAMA | reduced | {"architectures": ["LlamaForCausalLMEagle3"]}
            return config, eagle3(), "pytorch_model.bin"
        case "eagle/eagle":
            config = LLAMA | {"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5}
            return config, {"embed_tokens.weight": embedding, **eagle()}, file
        case "angelslim/eagle3":
            config = LLAMA | reduced | {
                "architectures": ["Eagle3LlamaForCausalLM"], "rope_theta": 1e6,
            }  # fmt: skip
            return config, eagle3(), file
        case "specforge/eagle3":
            config = LLAMA | reduced | {
                "architectures": ["LlamaForCausalLMEagle3"], "rope_theta": 1e6,
                "eagle_config": {
                    "eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True,
                },
            }  # fmt: skip
            return config, {**eagle3(), "embed_tokens.weight": embedding}, file
        case "specforge/eagle":
            config = LLAMA | {"architectures": ["Qwen2ForCausalLMEagle"], "rope_theta": 1e6}
            return config, eagle(bias=False, qkv_bias=True), file
        case "vllm/eagle3":  # five taps, biases, EAGLE-3.1
            config = LLAMA | reduced | {
                "architectures": ["Eagle3LlamaForCausalLM"], "rope_theta": 1e6,
                "attention_bias": True, "norm_before_residual": True, "norm_output": True,
                "fc_norm": True,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4, 5, 6]},
            }  # fmt: skip
            tensors = eagle3("model.layers.0.", 5, bias=True)
            tensors |= {f"fc_norm.{i}.weight": 1 + rand(D) for i in range(5)}
            return config, tensors, file
        case "vllm/peagle":  # biases in every layer
            config = LLAMA | reduced | {
                "architectures": ["LlamaForCausalLMEagle3"], "rope_theta": 1e6,
                "num_hidden_layers": 3, "attention_bias": True, "ptd_token_id": 96,
            }  # fmt: skip
            return config, peagle(bias=True), file
        case "vllm/eagle":
            config = LLAMA | {"architectures": ["EagleLlamaForCausalLM"], "rope_theta": 1e4}
            tensors = {f"model.{k}": t for k, t in eagle(bias=False).items()}
            return config, {**tensors, "lm_head.weight": head}, file
        case "vllm/medusa":
            config = {
                "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": D,
                "num_heads": 2, "num_hidden_layers": 1, "vocab_size": V,
                "truncated_vocab_size": U, "original_lm_head": True, "medusa_fc_bias": True,
            }  # fmt: skip
            tensors = {"lm_heads.0.weight": head[kept], "token_map": kept}
            for i in range(2):
                tensors[f"blocks.{i}.layers.0.weight"] = rand(D, D)
                tensors[f"blocks.{i}.layers.0.bias"] = rand(D)
            return config, tensors, file
        case "transformers/chain":  # ids it does not know share one row, the mean of the others
            config = LLAMA | {
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 5e5,
                "num_hidden_layers": 2,
                "slipstream": {"method": "chain", "unknown_id": int(unknown(kept)[0])},
            }  # fmt: skip
            own = rand(V, D)
            own[unknown(kept)] = own[kept].mean(dim=0)
            tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": own}
            for index in range(2):
                tensors |= layer(f"model.layers.{index}.", D)
                tensors[f"model.layers.{index}.input_layernorm.weight"] = 1 + rand(D)
            return config, tensors | {"model.norm.weight": 1 + rand(D)}, file
        case "medusa/medusa":  # the config counts 2 heads, the weights 3
            config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "model_type": "medusa"}
            return config, medusa(), "medusa_lm_head.pt"
        case "dflash/dflash":
            block = {"mask_token_id": 96, "target_layer_ids": ids}
            return blocks | {"block_size": 6, "dflash_config": block}, dflash(), file
        case "speculators/eagle3":  # one norm over all taps
            config = speculators("eagle3", "llama") | {
                "architectures": ["Eagle3DraftModel"], "norm_before_residual": True,
                "norm_before_fc": True, "fc_norm": False, "norm_output": False,
                "eagle_aux_hidden_state_layer_ids": None,
            }  # fmt: skip
            extra = {"input_norm.weight": 1 + rand(3 * D), "embed_tokens.weight": embedding}
            return config, {**eagle3("layers.0."), **extra}, file
        case "speculators/peagle":
            config = speculators("peagle", "llama", 3) | {
                "architectures": ["PEagleDraftModel"], "norm_before_residual": True,
                "norm_before_fc": False, "fc_norm": True, "norm_output": True,
                "eagle_aux_hidden_state_layer_ids": [1, 3, 6], "mask_token_id": 96,
                "embed_requires_grad": True,
            }  # fmt: skip
            return config, peagle() | {f"fc_norm.{i}.weight": 1 + rand(D) for i in range(3)}, file
        case "speculators/eagle":
            config = speculators("eagle", "llama") | {"layernorms": False, "fusion_bias": True}
            tensors = {
                name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): t
                for name, t in eagle().items()
            }
            return config, tensors, file
        case "speculators/dflash" | "speculators/dspark":
            kind = name.partition("/")[2]
            config = speculators(kind, "qwen3", 2) | {
                "block_size": 6, "mask_token_id": 96,
                "aux_hidden_state_layer_ids": [i + 1 for i in ids],
            }  # fmt: skip
            tensors = dflash() | rows | {"lm_head.weight": head[kept]}
            tensors["embed_tokens.weight"] = embedding
            if kind == "dspark":
                config |= {"markov_head_type": "vanilla", "markov_rank": 8}
                tensors |= markov(U) | {"confidence_head.proj.weight": rand(1, D + 8)}
            return config, tensors, file
        case "deepspec/dspark":
            config = blocks | {
                "architectures": ["Qwen3DSparkModel"], "block_size": 6, "mask_token_id": 96,
                "target_layer_ids": ids, "markov_rank": 8, "markov_head_type": "vanilla",
            }  # fmt: skip
            copies = {"embed_tokens.weight": embedding, "lm_head.weight": head}
            return config, {**dflash(), **markov(), **copies}, file
        case "specforge/dspark":  # an early file: everything of the head below logit_head
            block = {
                "projector_type": "dspark", "mask_token_id": 96, "target_layer_ids": ids,
                "markov_rank": 8, "markov_head_type": "vanilla",
            }  # fmt: skip
            early = {f"logit_head.{k}": t for k, t in markov().items()}
            return blocks | {"block_size": 6, "dflash_config": block}, dflash() | early, file
    raise ValueError(name)


LAYOUTS = (
    "eagle/eagle3", "eagle/eagle", "angelslim/eagle3", "specforge/eagle3", "specforge/eagle",
    "specforge/dspark", "vllm/eagle3", "vllm/eagle", "vllm/medusa", "medusa/medusa",
    "dflash/dflash", "speculators/eagle3", "speculators/eagle", "speculators/dflash",
    "speculators/dspark", "deepspec/dspark", "transformers/chain", "vllm/peagle",
    "speculators/peagle",
)  # fmt: skip


def write(folder: Path, config: dict, tensors: dict, weights: str = "model.safetensors") -> Path:
    """A folder of these files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if weights.endswith(".safetensors"):
        save_file(tensors, folder / weights)
    else:
        torch.save(tensors, folder / weights)
    return folder

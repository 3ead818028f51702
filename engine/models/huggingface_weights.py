"""Which tensor of a GPT-2 or Llama model in the Hugging Face format holds which of our global tensors.

GPT-2 stores [in, out] (its ``Conv1D``) and query, key and value side by side in one tensor; ours are [out, in] and
unfused. Llama's are as ours: its RoPE turns feature i with feature i + head_dim / 2, and so does ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.global_shapes import global_shapes
from engine.models.huggingface import family_of
from engine.planning.config import ModelConfig

HEAD = "lm_head.weight"
"""Present beside the embedding in some directories of tied models too."""

_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

_GPT2_LAYER = (
    ("ln_1", ("attention_norm",)),
    ("attn.c_attn", ("attention.query", "attention.key", "attention.value")),
    ("attn.c_proj", ("attention.output",)),
    ("ln_2", ("mlp_norm",)),
    ("mlp.c_fc", ("mlp.up",)),
    ("mlp.c_proj", ("mlp.down",)),
)
_LLAMA_LAYER = (
    ("self_attn.q_proj", ("attention.query",)),
    ("self_attn.k_proj", ("attention.key",)),
    ("self_attn.v_proj", ("attention.value",)),
    ("self_attn.o_proj", ("attention.output",)),
    ("mlp.gate_proj", ("mlp.gate",)),
    ("mlp.up_proj", ("mlp.up",)),
    ("mlp.down_proj", ("mlp.down",)),
    ("input_layernorm", ("attention_norm",)),
    ("post_attention_layernorm", ("mlp_norm",)),
)


@dataclass(frozen=True)
class WeightRule:
    """One tensor of theirs and the tensors of ours that it holds, stacked along dimension 0, then ``transposed``.

    ``rows``: extent of dimension 0 of each of ours. ``shape`` is that of theirs.
    """

    theirs: str
    ours: tuple[str, ...]
    rows: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool

    def split(self, theirs: Tensor) -> list[tuple[str, Tensor]]:
        """Our tensors, as views of theirs."""
        stacked = theirs.t() if self.transposed else theirs
        return list(zip(self.ours, torch.split(stacked, list(self.rows)), strict=True))

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Their tensor, contiguous, from ours in the order of ``self.ours``."""
        stacked = ours[0] if len(ours) == 1 else torch.cat(list(ours))
        return (stacked.t() if self.transposed else stacked).contiguous()


def weight_rules(model: ModelConfig) -> list[WeightRule]:
    """A rule for each tensor of the model in the Hugging Face format, in its order; ours are each in exactly one.

    Raises ValueError when ``model`` belongs to neither family.
    """
    gpt2 = family_of(model) == "gpt2"
    shapes = global_shapes(model)

    def rules(theirs: str, ours: Sequence[str], *, transposed: bool = False) -> Iterator[WeightRule]:
        for part in ("weight", "bias"):
            names = tuple(f"{name}.{part}" for name in ours)
            if names[0] in shapes:
                rows = tuple(shapes[name][0] for name in names)
                shape = (sum(rows), *shapes[names[0]][1:])
                turned = transposed and part == "weight"
                yield WeightRule(f"{theirs}.{part}", names, rows, shape[::-1] if turned else shape, turned)

    found: list[WeightRule] = []
    if gpt2:
        found += rules("transformer.wte", ("embedding.tokens",))
        found += rules("transformer.wpe", ("embedding.positions",))
    else:
        found += rules("model.embed_tokens", ("embedding.tokens",))
    for layer in range(model.num_layers):
        prefix = f"transformer.h.{layer}" if gpt2 else f"model.layers.{layer}"
        for theirs, ours in _GPT2_LAYER if gpt2 else _LLAMA_LAYER:
            names = [f"layers.{layer}.{name}" for name in ours]
            found += rules(f"{prefix}.{theirs}", names, transposed=gpt2 and not theirs.startswith("ln_"))
    found += rules("transformer.ln_f" if gpt2 else "model.norm", ("final_norm",))
    found += rules("lm_head", ("head",))
    assert sorted(name for rule in found for name in rule.ours) == sorted(shapes)
    return found


def canonical_name(name: str, model: ModelConfig) -> str | None:
    """The name as ``weight_rules`` has it of a tensor in somebody's file; None for a buffer that is no weight.

    Directories of a bare base model lack the prefix of the model with a head.
    """
    prefix = "transformer." if family_of(model) == "gpt2" else "model."
    bare = name.removeprefix(prefix)
    if _BUFFERS.fullmatch(bare):
        return None
    return bare if bare == HEAD else prefix + bare

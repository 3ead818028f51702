"""One decoder-only Transformer that is GPT-2 or Llama by its config, cut into pipeline stages.

Activations are [seq, batch, hidden]. Global parameter names (``L`` is the global layer number; weights are [out, in]):

    embedding.tokens.weight  embedding.positions.weight
    layers.L.attention_norm.{weight,bias}
    layers.L.attention.{query,key,value,output}.{weight,bias}
    layers.L.mlp_norm.{weight,bias}
    layers.L.mlp.{gate,up,down}.{weight,bias}
    final_norm.{weight,bias}
    head.weight

Modules, and so parameters, are made in the order in which the forward pass uses them; gradient buckets rely on it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.groups import Group, Groups
from engine.models.attention import SelfAttention
from engine.models.dropout import HiddenDropout, MaskKey
from engine.models.mlp import MLP
from engine.models.norm import Norm
from engine.models.rotary import rotary_table
from engine.parameters import ParameterSpec, Segment, attach, global_init, spec_of
from engine.planning.config import ModelConfig
from engine.tensor_parallel.embedding import VocabParallelEmbedding, vocab_parallel_weight
from engine.tensor_parallel.head import VocabParallelHead


class PositionEmbedding(nn.Module):
    """Learned positions, whole on every TP rank."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        shape = (config.max_sequence_length, config.hidden_size)
        whole = Segment("embedding.positions.weight", shape, (0, 0), shape, 0, "normal")
        self.weight = attach(
            nn.Parameter(torch.empty(shape, dtype=dtype, device=device)),
            ParameterSpec(shape, (whole,), tp_replicated=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add the positions 0..seq-1 to ``x`` [seq, batch, hidden]."""
        return x + self.weight[: x.shape[0]].unsqueeze(1)


class Embedding(nn.Module):
    """Tokens to hidden states, with learned positions when the config has them."""

    def __init__(
        self,
        tokens: nn.Parameter,
        config: ModelConfig,
        *,
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.tokens = VocabParallelEmbedding(tokens, group)
        self.positions: PositionEmbedding | None = None
        if config.position == "learned":
            self.positions = PositionEmbedding(config, dtype=dtype, device=device)
        self.dropout = HiddenDropout("embedding", config.hidden_dropout)

    def forward(self, tokens: Tensor, key: MaskKey | None) -> Tensor:
        """[batch, seq] int64 -> [seq, batch, hidden]."""
        x: Tensor = self.tokens(tokens.t())
        if self.positions is not None:
            x = self.positions(x)
        dropped: Tensor = self.dropout(x, key)
        return dropped


class Layer(nn.Module):
    """Norm, attention, norm, MLP, with a residual connection around each pair, into which dropout leads."""

    def __init__(
        self, number: int, config: ModelConfig, *, group: Group, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        name = f"layers.{number}"
        self.attention_norm = Norm(f"{name}.attention_norm", config, dtype=dtype, device=device)
        self.attention = SelfAttention(f"{name}.attention", config, group=group, dtype=dtype, device=device)
        self.mlp_norm = Norm(f"{name}.mlp_norm", config, dtype=dtype, device=device)
        self.mlp = MLP(f"{name}.mlp", config, group=group, dtype=dtype, device=device)
        self.attention_dropout = HiddenDropout(f"{name}.attention", config.hidden_dropout)
        self.mlp_dropout = HiddenDropout(f"{name}.mlp", config.hidden_dropout)

    def forward(self, x: Tensor, rotary: Tensor | None, key: MaskKey | None) -> Tensor:
        """[seq, batch, hidden] -> [seq, batch, hidden]."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), rotary), key)
        y: Tensor = x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), key)
        return y


class Stage(nn.Module):
    """The part of the model that one pipeline stage computes, cut for this TP rank. Parameters are not yet filled.

    The first stage has the embedding, the last the final norm and the head. Tied embeddings are one parameter when
    there is one stage; otherwise the last stage has a copy (``shared_embedding``, not ``owned``), whose gradient has to
    be summed with the first stage's over ``groups.embedding``.
    """

    def __init__(self, config: ModelConfig, groups: Groups, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        group = groups.tp
        tied = config.tie_embeddings

        def vocabulary(name: str, *, owned: bool = True) -> nn.Parameter:
            return vocab_parallel_weight(
                name,
                config.vocab_size,
                config.padded_vocab_size(group.size),
                config.hidden_size,
                group=group,
                dtype=dtype,
                device=device,
                shared=tied,
                owned=owned,
            )

        self.embedding: Embedding | None = None
        if groups.is_first_stage:
            tokens = vocabulary("embedding.tokens.weight")
            self.embedding = Embedding(tokens, config, group=group, dtype=dtype, device=device)

        self.layers = nn.ModuleList(
            Layer(number, config, group=group, dtype=dtype, device=device)
            for number in groups.layout.layers_of_stage(groups.at.pp, config.num_layers)
        )
        table = None
        if config.position == "rope":
            table = rotary_table(
                config.max_sequence_length, config.attention_head_dim, config.rope_theta, dtype=dtype, device=device
            )
        self.rotary: Tensor | None
        self.register_buffer("rotary", table, persistent=False)

        self.final_norm: Norm | None = None
        self.head: VocabParallelHead | None = None
        if groups.is_last_stage:
            self.final_norm = Norm("final_norm", config, dtype=dtype, device=device)
            if not tied:
                weight = vocabulary("head.weight")
            elif self.embedding is not None:
                weight = self.embedding.tokens.weight
            else:
                weight = vocabulary("embedding.tokens.weight", owned=False)
            self.head = VocabParallelHead(weight, config.vocab_size, group)

    @property
    def shared_embedding(self) -> nn.Parameter | None:
        """The tied embedding weight if this stage has one, on the first and the last stage alike."""
        found = [parameter for parameter in self.parameters() if spec_of(parameter).shared_embedding]
        return found[0] if found else None

    def _hidden(self, inputs: Tensor, key: MaskKey | None) -> Tensor:
        x = inputs if self.embedding is None else self.embedding(inputs, key)
        for layer in self.layers:
            x = layer(x, self.rotary, key)
        return x if self.final_norm is None else self.final_norm(x)

    def forward(self, inputs: Tensor, targets: Tensor | None, key: MaskKey | None = None) -> Tensor:
        """Run one micro-batch through this stage. Training gives the ``key`` of its dropout, evaluation none.

        ``inputs``: tokens int64 [batch, seq] on the first stage, hidden states [seq, batch, hidden] on another.
        Returns hidden states [seq, batch, hidden]; on the last stage, which needs ``targets`` [batch, seq], the SUM of
        the token losses as a scalar in fp32.
        """
        x = self._hidden(inputs, key)
        if self.head is None:
            return x
        assert targets is not None, "the last stage computes the loss"
        losses: Tensor = self.head(x, targets.t())
        return losses.sum()

    @torch.no_grad()
    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of the true vocabulary [seq, batch, vocab_size], on every TP rank of the last stage.

        No gradient and no dropout.
        """
        assert self.head is not None, "only the last stage has the head"
        return self.head.logits(self._hidden(inputs, None))


def initial_values(config: ModelConfig, seed: int) -> Callable[[Segment], Tensor]:
    """Function from a segment to its whole initial global tensor, in fp32 on the CPU; independent of the layout.

    Projections back into the residual stream are scaled by 1 / sqrt(2 * num_layers) (GPT-2, Radford et al. 2019).
    """
    scaled = config.init_std / (2 * config.num_layers) ** 0.5
    return lambda segment: global_init(segment, seed=seed, std=config.init_std, scaled_std=scaled)

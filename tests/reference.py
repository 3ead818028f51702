"""The oracle: the same model in plain torch on one process, unfused, and its training with torch's own AdamW.

Nothing of ``engine.models``, ``engine.tensor_parallel``, ``engine.pipeline`` or the optimizer is used here, that is its
worth. Parameters bear the engine's global names, so a dict of global tensors loads into it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from engine.parameters import Initializer, Segment, global_init
from engine.planning.config import ModelConfig, RunConfig
from engine.planning.schedule import learning_rate


class _RMSNorm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.epsilon).sqrt()


def _norm(model: ModelConfig) -> nn.Module:
    if model.norm == "layernorm":
        return nn.LayerNorm(model.hidden_size, eps=model.norm_epsilon)
    return _RMSNorm(model.hidden_size, model.norm_epsilon)


def _turn(x: Tensor, theta: float) -> Tensor:
    """RoPE on [batch, seq, heads, head_dim]: features (i, i + half) as one complex number, turned."""
    length, half = x.shape[1], x.shape[-1] // 2
    speed = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(length, dtype=torch.float64).outer(speed)
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None, :]
    z = torch.complex(x[..., :half], x[..., half:])
    z = z * turn.to(z.dtype)
    return torch.cat([z.real, z.imag], dim=-1)


class _Attention(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model
        width, kv_width = (n * model.attention_head_dim for n in (model.num_attention_heads, model.kv_heads))
        self.query = nn.Linear(model.hidden_size, width, bias=model.bias)
        self.key = nn.Linear(model.hidden_size, kv_width, bias=model.bias)
        self.value = nn.Linear(model.hidden_size, kv_width, bias=model.bias)
        self.output = nn.Linear(width, model.hidden_size, bias=model.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden]."""
        model = self.model
        q, k, v = (
            layer(x).unflatten(-1, (-1, model.attention_head_dim)) for layer in (self.query, self.key, self.value)
        )
        if model.position == "rope":
            q, k = _turn(q, model.rope_theta), _turn(k, model.rope_theta)
        repeats = model.num_attention_heads // model.kv_heads
        k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(model.attention_head_dim)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        y: Tensor = self.output(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))
        return y


class _MLP(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate = None
        if model.activation == "swiglu":
            self.gate = nn.Linear(model.hidden_size, model.ffn_hidden_size, bias=model.bias)
        self.up = nn.Linear(model.hidden_size, model.ffn_hidden_size, bias=model.bias)
        self.down = nn.Linear(model.ffn_hidden_size, model.hidden_size, bias=model.bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.gate is None:
            inner = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        else:
            gate = self.gate(x)
            inner = gate * torch.sigmoid(gate) * up
        y: Tensor = self.down(inner)
        return y


class _Layer(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(model)
        self.attention = _Attention(model)
        self.mlp_norm = _norm(model)
        self.mlp = _MLP(model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ReferenceModel(nn.Module):
    """The whole decoder on one process; batch first."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.ModuleDict({"tokens": nn.Embedding(model.vocab_size, model.hidden_size)})
        if model.position == "learned":
            self.embedding["positions"] = nn.Embedding(model.max_sequence_length, model.hidden_size)
        self.layers = nn.ModuleList(_Layer(model) for _ in range(model.num_layers))
        self.final_norm = _norm(model)
        self.head = None
        if not model.tie_embeddings:
            self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        self.to(dtype)

    def logits(self, tokens: Tensor) -> Tensor:
        """``tokens`` [batch, seq] -> [batch, seq, vocab_size]."""
        x = self.embedding["tokens"](tokens)
        if "positions" in self.embedding:
            x = x + self.embedding["positions"](torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        x = self.final_norm(x)
        return x @ (self.embedding["tokens"] if self.head is None else self.head).weight.t()

    def loss_sum(self, tokens: Tensor) -> Tensor:
        """Sum of the token losses of ``tokens`` [batch, seq + 1]: each predicts the next."""
        logits = self.logits(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def initial_weights(model: ModelConfig, seed: int) -> dict[str, Tensor]:
    """The global tensors, fp32, that a run starts from, by name."""
    weights = {}
    for name, parameter in ReferenceModel(model).named_parameters():
        init: Initializer = "normal"
        if name.endswith("bias"):
            init = "zeros"
        elif "norm" in name:
            init = "ones"
        elif name.endswith(("attention.output.weight", "mlp.down.weight")):
            init = "normal_scaled"
        shape = tuple(parameter.shape)
        segment = Segment(name, shape, (0,) * len(shape), shape, 0, init)
        scaled = model.init_std / math.sqrt(2 * model.num_layers)
        weights[name] = global_init(segment, seed=seed, std=model.init_std, scaled_std=scaled)
    return weights


def reference_model(model: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> ReferenceModel:
    """The oracle with the initial weights of ``seed``."""
    reference = ReferenceModel(model, dtype)
    reference.load_state_dict(initial_weights(model, seed))
    return reference


def train_reference(run: RunConfig, batches: Iterable[Sequence[Tensor]], dtype: torch.dtype) -> list[float]:
    """Train from the seed; returns the loss of each step, the mean over the tokens of the global batch.

    Each element of ``batches`` is one step's global batch: tensors [samples, seq + 1] that are put together.
    Clipping is ``torch.nn.utils.clip_grad_norm_``: gradients are multiplied by min(1, clip / (norm + 1e-6)).
    Matrices (embeddings too) decay, biases and norm weights do not. Must run in a process of its own: see the harness.
    """
    train = run.train
    model = reference_model(run.model, train.seed, dtype)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": train.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
    )
    num_tokens = train.global_batch_size * train.sequence_length
    losses = []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = model.loss_sum(torch.cat(list(batch))) / num_tokens
        loss.backward()
        losses.append(loss.item())
        if train.clip_grad > 0:
            nn.utils.clip_grad_norm_(parameters, train.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, train)
        optimizer.step()
    return losses

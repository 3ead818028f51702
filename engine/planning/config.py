"""What to train and how: the typed settings of a run, apart from any layout.

Every model here is frozen and refuses unknown fields, so a misspelt setting is an error that names it.
The layout (which ranks hold what) is in ``layout.py``; rules that need both are there too.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]


class Settings(BaseModel):
    """Base of all settings: immutable, unknown fields refused, NaN and infinity refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(Settings):
    """One decoder-only Transformer. GPT-2 and Llama are two settings of it (see ``family``).

    ``vocab_size`` is the true size of the vocabulary. Tensor parallelism pads it, but the padding never shows in
    checkpoints, in the softmax or in gradients.
    """

    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = Field(
        default=None, description="query groups (GQA); as many as attention heads when not given"
    )
    head_dim: PositiveInt | None = Field(default=None, description="hidden_size / num_attention_heads when not given")
    ffn_hidden_size: PositiveInt
    vocab_size: PositiveInt
    max_sequence_length: PositiveInt
    position: Literal["learned", "rope"] = "rope"
    rope_theta: float = Field(default=10_000.0, gt=0)
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_epsilon: float = Field(default=1e-5, gt=0)
    activation: Literal["gelu", "swiglu"] = "swiglu"
    bias: bool = Field(default=False, description="bias in the linear layers (GPT-2 has it, Llama has not)")
    tie_embeddings: bool = False
    init_std: float = Field(default=0.02, gt=0)
    hidden_dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of hidden states dropped after the embedding, each attention and each MLP",
    )
    vocab_padding_multiple: PositiveInt = Field(
        default=128, description="rows of the embedding are padded to a multiple of this times TP"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}; "
                "choose a multiple or give head_dim"
            )
        if self.num_attention_heads % self.kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not divisible by "
                f"num_key_value_heads {self.kv_heads}"
            )
        if self.position == "rope" and self.attention_head_dim % 2:
            raise ValueError(f"rope needs an even head_dim, not {self.attention_head_dim}")
        return self

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def attention_head_dim(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding that TP ``tp`` ranks hold together: the smallest multiple of tp and the padding."""
        multiple = self.vocab_padding_multiple * tp
        return -(-self.vocab_size // multiple) * multiple


class CorpusConfig(Settings):
    """Where the tokens are: the common prefix of a Megatron-compatible ``.bin``/``.idx`` pair."""

    path: str = Field(min_length=1, description="prefix: PATH.bin and PATH.idx")


class LossScaleConfig(Settings):
    """Dynamic loss scaling of an fp16 run; the factors are best powers of two, which do not round."""

    initial: float = Field(default=2.0**32, gt=0, description="each overflow on the way down to a fit is a lost step")
    growth_interval: PositiveInt = Field(default=1000, description="steps without overflow after which it grows")
    growth_factor: float = Field(default=2.0, gt=1)
    backoff_factor: float = Field(default=0.5, gt=0, lt=1, description="what an overflow multiplies it by")
    minimum: float = Field(default=1.0, gt=0, description="an overflow at this scale ends the run")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.initial < self.minimum:
            raise ValueError(f"initial {self.initial:g} is below minimum {self.minimum:g}")
        return self


class TrainConfig(Settings):
    """The training run: batch, optimizer, schedule, precision. Nothing here depends on the layout."""

    seed: NonNegativeInt = 1234
    sequence_length: PositiveInt
    global_batch_size: PositiveInt = Field(description="samples a step, whatever the layout")
    micro_batch_size: PositiveInt = 1
    train_steps: PositiveInt
    lr: float = Field(default=3e-4, gt=0, description="peak learning rate")
    min_lr: float = Field(default=0.0, ge=0)
    warmup_steps: NonNegativeInt = 0
    decay_steps: PositiveInt | None = Field(default=None, description="end of the cosine; train_steps when not given")
    weight_decay: float = Field(default=0.1, ge=0, description="for matrices; biases and norms are never decayed")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_eps: float = Field(default=1e-8, gt=0)
    clip_grad: float = Field(default=1.0, ge=0, description="global gradient norm; 0 switches clipping off")
    frozen: tuple[str, ...] = Field(
        default=(), description="parameters that are not trained: shell-style patterns of their global names"
    )
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    loss_scale: LossScaleConfig | None = Field(default=None, description="for fp16 alone; its defaults when not given")
    bucket_size_mb: float = Field(default=25.0, gt=0, description="size of one gradient bucket in MiB of fp32")
    log_samples: bool = Field(default=False, description="write the ids of the samples that each step consumed")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"micro_batch_size {self.micro_batch_size}"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is above lr {self.lr}")
        if self.warmup_steps > (self.decay_steps or self.train_steps):
            raise ValueError(f"warmup_steps {self.warmup_steps} goes beyond the end of the schedule")
        if self.loss_scale is not None and self.precision != "fp16":
            raise ValueError(f"loss_scale is for precision fp16, not {self.precision}")
        return self

    @property
    def scaling(self) -> LossScaleConfig | None:
        """The loss scaling in force: None unless the precision is fp16."""
        if self.precision != "fp16":
            return None
        return self.loss_scale or LossScaleConfig()

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the whole global batch; replicas share them out."""
        return self.global_batch_size // self.micro_batch_size


class CheckpointConfig(Settings):
    """When and where state goes to disk."""

    directory: str = Field(min_length=1)
    save_interval: PositiveInt = Field(default=100, description="steps between two saves")
    keep: PositiveInt = Field(default=3, description="complete checkpoints that are kept")
    asynchronous: bool = Field(
        default=True,
        description="write from a copy in host memory while training goes on; costs memory for one copy of the state",
    )
    max_failures: PositiveInt = Field(default=3, description="saves that fail in a row before the run ends for it")


class RunConfig(Settings):
    """Everything that the engine needs to train, apart from the layout."""

    model: ModelConfig
    data: CorpusConfig
    train: TrainConfig
    checkpoint: CheckpointConfig

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.train.sequence_length > self.model.max_sequence_length:
            raise ValueError(
                f"train.sequence_length {self.train.sequence_length} is above "
                f"model.max_sequence_length {self.model.max_sequence_length}"
            )
        return self

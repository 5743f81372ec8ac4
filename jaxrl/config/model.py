"""The models, their optimizers, and how they are laid out on devices."""

# OmegaConf reads these annotations at run time: no `from __future__ import annotations` here.
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "CriticConfig",
    "LogprobConfig",
    "MeshConfig",
    "OptimConfig",
    "OptimizerConfig",
    "PackingConfig",
    "PolicyConfig",
]


@dataclass(frozen=True)
class PolicyConfig:
    """The language model that is trained (section `model`)."""

    path: str = ""
    """Folder of a Hugging Face causal LM: config.json, safetensors, tokenizer. Required."""
    make: str | None = None
    """`module:function`, called as fn(folder, seed) to build that folder when it does not exist."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; master weights, optimizer state, logits and losses are float32 anyway."""
    remat: Literal["none", "dots", "attention", "full"] = "full"
    """What a layer recomputes in the backward pass: nothing, all but matrix products, all but
    attention itself (where that is blockwise or splash), all."""
    attention: Literal["auto", "dense", "blockwise", "splash"] = "auto"
    """dense: scores of all pairs of a row at once; blockwise: memory linear in the row length, and
    faster beyond 256 tokens; splash: JAX's TPU kernel, which cannot share prompts. auto takes what
    suits length and device; every run says at its start what that is."""


@dataclass(frozen=True)
class CriticConfig:
    """Who estimates the value of a state (section `critic`)."""

    kind: Literal["head", "model"] = "head"
    """A float32 head on the policy's trunk, or a trunk of its own with that head."""
    path: str | None = None
    """For kind=model: folder the trunk starts from, a language model's, a reward model's (a
    sequence classifier with one label) or an earlier critic's (a token classifier, written by
    `convert.py --critic`); null starts from the policy's weights."""
    keep_head: bool = False
    """Start from that model's own head, instead of zero."""
    trunk_gradient: bool = True
    """For kind=head: whether the value loss also moves the policy's trunk."""
    warmup_iterations: int = 0
    """Iterations that train the critic alone, so that a zero head does not steer the policy."""


@dataclass(frozen=True)
class LogprobConfig:
    """How log-probabilities are computed (section `logprob`)."""

    chunk_size: int | None = 1024
    """Positions a chunk along the sequence; null computes all at once. Same numbers either way."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule for one parameter tree (sections `optim.policy`, `optim.value`)."""

    lr: float = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: stay, or fall to min_lr_ratio * lr at the last optimizer step."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    min_lr_ratio: float = 0.0
    """Where a falling schedule ends, as a fraction of lr."""
    beta1: float = 0.9
    """Decay of the gradient average."""
    beta2: float = 0.99
    """Decay of the squared gradient's average; RL batches change fast, so shorter than .999."""
    eps: float = 1e-8
    """Added to the root of the squared average."""
    weight_decay: float = 0.0
    """Decoupled decay; never on norms and biases."""
    max_grad_norm: float = 1.0
    """Global norm to which the accumulated gradient is clipped; 0 does not clip."""


@dataclass(frozen=True)
class OptimConfig:
    """One optimizer for each tree (section `optim`)."""

    policy: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The policy's."""
    value: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """The critic's: ten times the policy's rate, since it starts from nothing."""


@dataclass(frozen=True)
class PackingConfig:
    """How trajectories are laid out in rows (section `packing`)."""

    micro_batch_tokens: int = 4096
    """Tokens a micro-batch: rows times row length."""
    row_lengths: list[int] = field(default_factory=lambda: [256, 512, 1024, 2048, 4096])
    """Allowed row lengths, one compile each; the shortest that holds every trajectory is taken."""
    share_prompts: bool = True
    """The samples of a prompt share one copy of it in a row, as far as they fit: same numbers, the
    prompt computed once."""


@dataclass(frozen=True)
class MeshConfig:
    """Devices (section `mesh`); -1 takes what is left, at most once."""

    data: int = 1
    """Replicas of everything."""
    fsdp: int = -1
    """Shards of parameters, optimizer state and rows."""
    tensor: int = 1
    """Shards of heads, feed-forward and vocabulary."""

"""Every setting of a run: frozen dataclasses, a reason and a unit for each.

`config_io` turns YAML and ``key.sub=value`` into a `Config`; nothing else parses settings, and
`config_checks` holds ranges and the rules that concern several settings at once. Numbers that
follow from others are properties, never settings.
"""

# OmegaConf reads these annotations at run time: no `from __future__ import annotations` here.
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "EvalConfig",
    "LogConfig",
    "LogprobConfig",
    "MeshConfig",
    "OptimConfig",
    "OptimizerConfig",
    "PackingConfig",
    "PolicyConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RolloutConfig",
    "SourceConfig",
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
    remat: Literal["none", "dots", "full"] = "full"
    """What a layer recomputes in the backward pass: nothing, all but matrix products, all."""


@dataclass(frozen=True)
class CriticConfig:
    """Who estimates the value of a state (section `critic`)."""

    kind: Literal["head", "model"] = "head"
    """A float32 head on the policy's trunk, or a trunk of its own with that head."""
    path: str | None = None
    """For kind=model: folder the trunk starts from; null starts from the policy's weights."""
    trunk_gradient: bool = True
    """For kind=head: whether the value loss also moves the policy's trunk."""
    warmup_iterations: int = 0
    """Iterations that train the critic alone, so that a zero head does not steer the policy."""


@dataclass(frozen=True)
class SourceConfig:
    """Where prompts come from (sections `data.train` and `data.eval`)."""

    kind: Literal["file", "reasoning_gym", "python"] = "file"
    """A file or dataset folder; a reasoning_gym generator; a Python function that yields rows."""
    path: str | None = None
    """For kind=file: JSONL, parquet, or a Hugging Face dataset folder."""
    split: str | None = None
    """For a dataset folder with several splits: which one."""
    name: str | None = None
    """For kind=reasoning_gym: the dataset's name; for kind=python: `module:function`."""
    params: dict[str, Any] = field(default_factory=dict)
    """Arguments of the generator or function."""
    size: int | None = None
    """Rows to use; null uses all (required for reasoning_gym)."""
    seed: int = 0
    """Seed of a reasoning_gym generator."""


@dataclass(frozen=True)
class DataConfig:
    """Prompts (section `data`)."""

    train: SourceConfig = field(default_factory=SourceConfig)
    """Prompts to train on."""
    eval: SourceConfig | None = None
    """Held-out prompts; null evaluates nothing."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    chat: bool = True
    """Whether a string prompt is put through the chat template as a user message."""
    system: str | None = None
    """System message put before a string prompt (chat only); null leaves it to the template."""
    chat_template: str | None = None
    """Jinja template, or the path of a file holding one, that replaces the tokenizer's own."""
    max_prompt_tokens: int = 512
    """Longest prompt, in tokens."""
    overlong: Literal["drop", "error", "left", "right", "middle"] = "drop"
    """A longer prompt is dropped and counted, stops the run, or loses tokens at its left end
    (the last max_prompt_tokens stay), at its right end, or in its middle."""
    shuffle: bool = True
    """A new order every epoch, drawn from the seed."""


@dataclass(frozen=True)
class RewardFunctionConfig:
    """One reward function (an entry of `reward.functions`)."""

    fn: str = ""
    """`module:function`, called as fn(prompts=, completions=, completion_ids=, **columns);
    returns one float a completion."""
    weight: float = 1.0
    """Factor in the weighted sum."""


@dataclass(frozen=True)
class RewardConfig:
    """How completions are scored (section `reward`)."""

    functions: list[RewardFunctionConfig] = field(default_factory=list)
    """At least one. The score is the weighted sum."""
    timeout_s: float = 60.0
    """Seconds a call in the worker process may take."""
    on_invalid: Literal["error", "drop"] = "error"
    """None, NaN or inf for a completion stops the run, or takes it out of the update, counted."""


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are sampled (section `rollout`)."""

    engine: Literal["trainside", "sglang"] = "trainside"
    """Who samples: the trainer's own sampler, or SGLang servers over HTTP."""
    prompts: int = 16
    """Prompts an iteration."""
    samples: int = 4
    """Completions a prompt."""
    max_new_tokens: int = 128
    """Longest completion, in tokens."""
    temperature: float = 1.0
    """Sampling temperature, also that of every log-probability; 1 trains what is sampled."""
    top_k: int = 0
    """0 keeps all tokens; anything else makes behaviour and trained policy differ."""
    top_p: float = 1.0
    """1 keeps all tokens."""
    min_p: float = 0.0
    """0 keeps all tokens."""
    stop_token_ids: list[int] | None = None
    """Null takes the generation config's end-of-sequence ids."""
    batch_size: int = 64
    """trainside: completions decoded at once."""
    max_staleness: int = 0
    """sglang: 0 is synchronous. k > 0 generates up to k iterations ahead while updates run, with
    weights at most k versions older than those that train on them; corrected by
    `algorithm.importance` or `algorithm.old_logprobs`."""
    urls: list[str] = field(default_factory=list)
    """sglang: the servers, http://host:port each. Weights are published to every one."""
    router: str | None = None
    """sglang: address of a router in front of them, to which requests go instead."""
    launch: str | None = None
    """sglang: command line that starts a server, run once for each of `urls` and ended with the
    run; {model}, {host}, {port} and {index} are filled in. Null: they run already."""
    concurrency: int = 64
    """sglang: requests in flight, for each server."""
    request_timeout_s: float = 600.0
    """sglang: seconds a completion may take before it is asked for again."""
    health_timeout_s: float = 20.0
    """sglang: seconds without a sign of life after which a server is left out."""
    gone_timeout_s: float = 600.0
    """sglang: seconds without any usable server after which the run stops; starting counts."""
    attempts: int = 4
    """sglang: how often a completion is asked for while answers are unusable; then left out."""
    publish: Literal["disk", "tensor"] = "disk"
    """sglang: weights travel as safetensors in a folder both sides see, or in requests."""
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """sglang: dtype of the weights on the way; the server casts to its own."""
    publish_dir: str | None = None
    """sglang, publish=disk: that folder; null is run_dir/weights, or shared memory if colocated."""
    bucket_bytes: int = 268435456
    """sglang, publish=tensor: bytes of weights in a request."""
    probe_tolerance: float = 0.05
    """sglang: largest mean difference, in nats, between the log-probabilities of a probe prompt by
    a server and by the trainer after each publish; bfloat16 servers are within .02."""
    colocated: bool = False
    """sglang: the servers share the trainer's accelerators and give their memory back while it
    trains (servers started with --enable-memory-saver)."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """PPO itself (section `algorithm`)."""

    advantage_mode: Literal["gae", "grpo"] = "gae"
    """Generalised advantages from a critic, or group-relative scores without one."""
    gamma: float = 1.0
    """Discount a token; 1, since a response is one short episode (Stiennon et al. 2020)."""
    lam: float = 0.95
    """GAE's lambda (Schulman et al. 2016)."""
    group_scale: Literal["std", "none", "loo"] = "std"
    """grpo: divide by the group's deviation, do not, or use the mean of the others as baseline."""
    whiten_advantages: bool = True
    """gae: mean 0 and deviation 1 over all policy tokens of the iteration."""
    clip_low: float = 0.2
    """Ratio is clipped at 1 - clip_low (Schulman et al. 2017)."""
    clip_high: float = 0.2
    """Ratio is clipped at 1 + clip_high; DAPO takes .28."""
    dual_clip: float | None = None
    """Bound of the loss where A < 0, in units of |A| (Ye et al. 2020 take 3); null: none."""
    value_clip: float | None = 0.2
    """How far values move from the old ones before their gradient stops; null: no clipping."""
    value_coef: float = 0.5
    """Weight of the value loss beside the policy loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, per nat."""
    kl_in: Literal["off", "report", "reward", "loss"] = "off"
    """Where the penalty for leaving the reference enters: never in two places. "report" measures
    the KL without a penalty; "off" needs no reference and saves its forward pass."""
    kl_kind: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimator of the penalty (Schulman 2020): k1 is unbiased in the reward; the loss wants k2."""
    kl_coef: float = 0.05
    """Weight of the penalty, reward units a nat."""
    kl_target: float | None = None
    """kl_in=reward: adapt kl_coef towards this KL a response, in nats (Ziegler et al. 2019); null
    keeps it fixed."""
    kl_horizon: int = 10000
    """Responses over which the adaptive coefficient moves by its whole error."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Denominator of the ratio: log-probabilities of the trainer's own pass over the batch, or
    those that the sampler reported (no correction is needed then, nor possible)."""
    importance: Literal["off", "token", "sequence"] = "off"
    """Correct for sampling with other numerics or weights: old over behaviour policy, capped."""
    importance_cap: float = 2.0
    """Largest importance weight."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """How per-token losses become one number; the last divides by rollout.max_new_tokens."""
    epochs: int = 1
    """Passes over each rollout batch."""
    updates: int = 1
    """Optimizer steps a pass; the batch is split by trajectories."""
    max_skipped_in_a_row: int = 3
    """Non-finite updates in a row after which the run stops."""


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


@dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation (section `eval`)."""

    every: int = 5
    """Iterations between evaluations; the first and last state always are. 0: only those."""
    max_new_tokens: int | None = None
    """Null takes rollout.max_new_tokens."""
    temperature: float = 0.0
    """0 is greedy."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving (section `checkpoint`)."""

    every: int = 10
    """Iterations between checkpoints; the last is always saved. 0: only the last."""
    keep: int = 2
    """Newest checkpoints kept."""
    export: bool = True
    """Write the trained policy as a Hugging Face folder at the end."""


@dataclass(frozen=True)
class LogConfig:
    """What a person sees (section `log`)."""

    tensorboard: bool = True
    """Event files beside metrics.jsonl."""
    samples: int = 4
    """Completions written out an iteration."""
    progress: bool = True
    """A line an iteration on the terminal."""


@dataclass(frozen=True)
class Config:
    """A whole run."""

    run_dir: str = "runs/default"
    """Everything the run writes lies here."""
    seed: int = 0
    """Seeds data order, sampling and initialisation."""
    iterations: int = 100
    """Rollout-and-update rounds."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Go on from the checkpoint in run_dir if there is one (auto), refuse to start if there is one
    (never), or insist on one (must)."""
    model: PolicyConfig = field(default_factory=PolicyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    logprob: LogprobConfig = field(default_factory=LogprobConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def trajectories(self) -> int:
        """Completions an iteration."""
        return self.rollout.prompts * self.rollout.samples

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run: the horizon of every schedule."""
        return self.iterations * self.algorithm.epochs * self.algorithm.updates

    @property
    def max_tokens(self) -> int:
        """Longest trajectory: prompt and response."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference policy takes part."""
        return self.algorithm.kl_in != "off"

    @property
    def needs_critic(self) -> bool:
        """Whether a value function takes part."""
        return self.algorithm.advantage_mode == "gae"

"""How completions are sampled, and by whom."""

# OmegaConf reads these annotations at run time: no `from __future__ import annotations` here.
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "RolloutConfig",
]


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
    """Longest response, in tokens; with `env` all turns together, the environment's included."""
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
    dynamic_sampling: bool = False
    """Prompts whose samples all score the same are replaced by the next ones (DAPO, Yu et al.
    2025): no part of a batch without a group-relative signal."""
    max_rounds: int = 4
    """dynamic_sampling: rounds of sampling an iteration; then groups without spread fill it up."""
    env: str | None = None
    """Several turns: `module:function`, an async callable asked after each of the policy's turns as
    fn(messages=, text=, **columns); returns (next message or null, reward, whether it is over)."""
    max_turns: int = 8
    """env: most turns of the policy; an episode that would go on then counts as truncated."""
    max_turn_tokens: int | None = None
    """env: most tokens of one turn; null: max_new_tokens."""
    env_timeout_s: float = 60.0
    """env: seconds a call may take."""
    batch_size: int = 64
    """trainside: completions decoded at once."""
    gather_weights: bool = True
    """trainside: what a mesh splits over fsdp is fetched once a batch, in the compute dtype; false:
    in every decoding step, layer by layer, for models that do not fit otherwise."""
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

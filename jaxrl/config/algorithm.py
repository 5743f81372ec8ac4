"""PPO itself."""

# OmegaConf reads these annotations at run time: no `from __future__ import annotations` here.
from dataclasses import dataclass
from typing import Literal

__all__ = ["AlgorithmConfig"]


@dataclass(frozen=True)
class AlgorithmConfig:
    """PPO itself (section `algorithm`)."""

    # -- advantages
    advantage_mode: Literal["gae", "grpo", "returns"] = "gae"
    """Generalised advantages from a critic; group-relative scores without one (Shao et al. 2024);
    or returns-to-go whose baseline is the mean that whitening takes out (REINFORCE++, Hu 2025)."""
    gamma: float = 1.0
    """Discount a step; 1, since a response is one short episode (Stiennon et al. 2020)."""
    lam: float = 0.95
    """GAE's lambda (Schulman et al. 2016)."""
    lam_alpha: float | None = None
    """gae: lambda of the policy's advantages 1 - 1 / (lam_alpha * steps of the response), so that
    long responses hear of their score (VAPO, Yue et al. 2025, takes .05); null: lam."""
    value_lam: float | None = None
    """gae: lambda of the critic's targets; VAPO takes 1, which keeps their bias out; null: lam."""
    gae_over: Literal["policy_tokens", "response"] = "policy_tokens"
    """What a step is: the policy's own tokens, others passed over; or every token of the response,
    so that tool output has values too, though only the policy's own tokens are trained."""
    group_scale: Literal["std", "none", "loo"] = "std"
    """grpo: divide by the group's deviation, do not, or use the mean of the others as baseline."""
    whiten: Literal["batch", "group", "off"] | None = None
    """Advantages of mean 0 and deviation 1 over the policy tokens of the iteration, of each prompt,
    or as they are; null: batch, but off for grpo, whose groups are scaled already."""
    # -- endings
    truncated: Literal["keep", "zero", "soft", "bootstrap", "mask"] = "keep"
    """A response that the length limit ended keeps its score; gets 0; every response pays for the
    last overlong_buffer tokens it may use (DAPO, Yu et al. 2025); gets the value of the state it
    was cut at instead of a score (gae); or takes no part."""
    overlong_buffer: int = 0
    """truncated=soft: tokens below rollout.max_new_tokens over which the penalty rises to whole."""
    overlong_penalty: float = 1.0
    """truncated=soft: the penalty of a response that uses all tokens, in units of the score."""
    missing_eos_penalty: float = 0.0
    """Taken off the score of a response that the length limit ended, so that ending is learned."""
    # -- policy loss
    ratio_level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or the geometric mean over its sequence (GSPO, Zheng et al. 2025, with
    clips near 3e-4 and aggregation seq-mean-token-mean)."""
    clip_low: float = 0.2
    """Ratio is clipped at 1 - clip_low (Schulman et al. 2017)."""
    clip_high: float = 0.2
    """Ratio is clipped at 1 + clip_high; DAPO takes .28."""
    dual_clip: float | None = None
    """Bound of the loss where A < 0, in units of |A| (Ye et al. 2020 take 3); null: none."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, per nat."""
    nll_coef: float = 0.0
    """Weight of the negative log-likelihood of good responses (VAPO takes .1)."""
    nll_above: float = 0.0
    """A response is good if its score, before scaling and penalties, exceeds this."""
    # -- KL
    kl_in: Literal["off", "report", "reward", "loss"] = "off"
    """Where the penalty for leaving the reference enters: never in two places. "report" measures
    the KL without a penalty; "off" needs no reference and saves its forward pass."""
    kl_kind: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimator of the penalty (Schulman 2020): k1 is unbiased in the reward; the loss wants k2."""
    kl_weighted: bool = False
    """kl_in=loss: weigh each token's estimate with its ratio, which gives k1 and k3 the gradient of
    the KL itself (DeepSeek-V3.2, 2025)."""
    kl_coef: float = 0.05
    """Weight of the penalty, reward units a nat."""
    kl_target: float | None = None
    """kl_in=reward: adapt kl_coef towards this KL a response, in nats (Ziegler et al. 2019); null
    keeps it fixed."""
    kl_horizon: int = 10000
    """Responses over which the adaptive coefficient moves by its whole error."""
    # -- value loss
    value_clip: float | None = 0.2
    """How far values move from the old ones before their gradient stops; null: no clipping."""
    value_coef: float = 0.5
    """Weight of the value loss beside the policy loss."""
    # -- off-policy samples
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Denominator of the ratio: log-probabilities of the trainer's own pass over the batch, or
    those that the sampler reported (no correction is needed then, nor possible)."""
    importance: Literal["off", "token", "sequence"] = "off"
    """Correct for sampling with other numerics or weights: old over behaviour policy, capped."""
    importance_cap: float = 2.0
    """Largest importance weight (Yao et al. 2025)."""
    rejection: Literal["off", "token", "sequence", "geometric"] = "off"
    """Leave out of the policy loss what has an old over behaviour ratio outside the two bounds:
    tokens, or sequences by the product or the geometric mean of their tokens' ratios."""
    rejection_low: float = 0.5
    """Smallest ratio that is kept."""
    rejection_high: float = 2.0
    """Largest ratio that is kept."""
    # -- the optimizer step
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

    @property
    def whitening(self) -> Literal["batch", "group", "off"]:
        """`whiten`, with the default of the advantage mode filled in."""
        return self.whiten or ("off" if self.advantage_mode == "grpo" else "batch")

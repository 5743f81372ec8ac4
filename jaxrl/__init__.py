"""PPO with generalized advantage estimation for language models, in JAX.

The maths is here, as functions of arrays; it loads nothing but JAX. The trainer and its rooms are
modules of their own (`jaxrl.trainer`, `jaxrl.models`, ...), loaded when imported.
"""

from jaxrl.advantages import Advantages, adaptive_lambda, gae
from jaxrl.groups import group_advantages, whiten_groups
from jaxrl.logprobs import token_logprobs, token_logprobs_and_entropy
from jaxrl.losses import (
    PolicyLoss,
    ValueLoss,
    explained_variance,
    importance_weights,
    kl_estimate,
    ppo_policy_loss,
    ppo_value_loss,
)
from jaxrl.ratios import sequence_log_ratio, within_bounds
from jaxrl.reduce import Weighted, aggregate, masked_mean, sum_finite, whiten
from jaxrl.rewards import adaptive_kl_coef, ending_scores, overlong_penalty, token_rewards

__all__ = [
    "Advantages",
    "PolicyLoss",
    "ValueLoss",
    "Weighted",
    "adaptive_kl_coef",
    "adaptive_lambda",
    "aggregate",
    "ending_scores",
    "explained_variance",
    "gae",
    "group_advantages",
    "importance_weights",
    "kl_estimate",
    "masked_mean",
    "overlong_penalty",
    "ppo_policy_loss",
    "ppo_value_loss",
    "sequence_log_ratio",
    "sum_finite",
    "token_logprobs",
    "token_logprobs_and_entropy",
    "token_rewards",
    "whiten",
    "whiten_groups",
    "within_bounds",
]

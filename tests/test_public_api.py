"""What `import jaxrl` promises: names, signatures, result fields, and examples that run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import typing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

import jaxrl

SIGNATURES = {
    "gae": "rewards, values, mask, *, gamma=1.0, lam=0.95, bootstrap=None, segment_ids=None",
    "group_advantages": "scores, group_ids, num_groups, *, scale='std', ddof=0, eps=1e-06, "
    "mask=None",
    "masked_mean": "x, mask, *, axis=None",
    "whiten": "x, mask, *, shift_mean=True, ddof=0, eps=1e-08",
    "aggregate": "per_token, mask, *, mode, segment_ids=None, horizon=None, denominator=None",
    "token_logprobs": "hidden, head, targets, *, chunk_size=1024, temperature=1.0, bias=None, "
    "softcap=None, mask=None",
    "token_logprobs_and_entropy": "hidden, head, targets, *, chunk_size=1024, temperature=1.0, "
    "bias=None, softcap=None, mask=None",
    "ppo_policy_loss": "logprobs, old_logprobs, advantages, *, clip_low=0.2, clip_high=0.2, "
    "dual_clip=None, mask=None",
    "ppo_value_loss": "values, old_values, returns, *, clip=0.2, mask=None",
    "kl_estimate": "logprobs, ref_logprobs, *, kind='k1', mask=None",
    "token_rewards": "scores, mask, *, kl=None, kl_coef=0.0, segment_ids=None, score_mask=None",
    "importance_weights": "logprobs, behaviour_logprobs, mask, *, level='token', cap=None, "
    "segment_ids=None",
    "explained_variance": "values, returns, mask",
    "adaptive_kl_coef": "coef, observed_kl, *, target, horizon, n",
    "sum_finite": "parts",
    "adaptive_lambda": "lengths, alpha",
    "whiten_groups": "x, mask, group_ids, num_groups, *, eps=1e-08",
    "sequence_log_ratio": "logprobs, old_logprobs, mask, *, segment_ids=None",
    "within_bounds": "logprobs, behaviour_logprobs, mask, *, low, high, level='token', "
    "segment_ids=None",
    "overlong_penalty": "lengths, *, max_length, buffer, penalty=1.0",
    "ending_scores": "scores, truncated, lengths, *, mode='keep', max_length=0, buffer=0, "
    "penalty=1.0, missing_eos_penalty=0.0",
}
FIELDS = {
    "Advantages": ("advantages", "returns"),
    "PolicyLoss": ("per_token", "ratio", "clipped", "dual_clipped"),
    "ValueLoss": ("per_token", "clipped"),
}
MATHS = ("advantages", "groups", "logprobs", "losses", "ratios", "reduce", "rewards")


def test_all_is_literal_sorted_complete_and_importable() -> None:
    tree = ast.parse(Path(str(jaxrl.__file__)).read_text(encoding="utf-8"))
    assignments = [n for n in tree.body if isinstance(n, ast.Assign)]
    literal = ast.literal_eval(assignments[0].value)
    assert literal == jaxrl.__all__ == sorted(literal)
    assert set(literal) == {*SIGNATURES, *FIELDS, "Weighted"}
    assert all(hasattr(jaxrl, name) for name in literal)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_pinned(name: str) -> None:
    signature = inspect.signature(getattr(jaxrl, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    given = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    assert given == f"({SIGNATURES[name]})"


@pytest.mark.parametrize("name", SIGNATURES)
def test_everything_is_annotated_and_the_annotations_resolve(name: str) -> None:
    function = getattr(jaxrl, name)
    hints = typing.get_type_hints(function)
    assert set(hints) == {*inspect.signature(function).parameters, "return"}


@pytest.mark.parametrize("name", FIELDS)
def test_result_fields_are_pinned(name: str) -> None:
    assert getattr(jaxrl, name)._fields == FIELDS[name]


@pytest.mark.parametrize("module", MATHS)
def test_the_examples_in_the_docstrings_run(module: str) -> None:
    names = {"jnp": jnp, "jax": jax}
    result = doctest.testmod(importlib.import_module(f"jaxrl.{module}"), extraglobs=names)
    assert result.failed == 0 and result.attempted > 0


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_function_states_its_contract(name: str) -> None:
    doc = inspect.getdoc(getattr(jaxrl, name)) or ""
    assert ">>> " in doc
    if name not in ("sum_finite", "token_logprobs_and_entropy"):  # the second refers to the first
        missing = [word for word in ("Args:", "Returns:", "Raises:", "Source:") if word not in doc]
        assert not missing
    assert len(doc.splitlines()[0]) < 100 and doc.splitlines()[0].endswith(".")


X, M, IDS = np.linspace(-1, 1, 6).reshape(2, 3), np.ones((2, 3), bool), np.zeros((2, 3), int)
CALLS = {
    "gae": lambda f: f(X, X, M, gamma=X[:, :1], bootstrap=0, segment_ids=IDS),
    "group_advantages": lambda f: f(X[0], [0, 0, 1], 2, mask=[1, 1, 0]),
    "masked_mean": lambda f: (f(X, M, axis=-1), f([1, 2], [True, False])),
    "whiten": lambda f: f(jnp.asarray(X), M, shift_mean=False, ddof=1),
    "aggregate": lambda f: f(X, M, mode="seq-mean-token-sum-norm", horizon=3, denominator=6),
    "token_logprobs": lambda f: f(X, np.eye(3), IDS[0, :2], bias=X[0], softcap=2.0, mask=M[0, :2]),
    "token_logprobs_and_entropy": lambda f: f(X, np.eye(3), IDS[0, :2], chunk_size=None),
    "ppo_policy_loss": lambda f: f(X, X, X, clip_low=0, dual_clip=3, mask=M),
    "ppo_value_loss": lambda f: f(X, X, X, clip=None, mask=M),
    "kl_estimate": lambda f: f(X, jnp.asarray(X), kind="k3"),
    "token_rewards": lambda f: f(X[:, 0], M, kl=X, kl_coef=jnp.float32(0.1), score_mask=M),
    "importance_weights": lambda f: f(X, X, M, level="sequence", cap=2, segment_ids=IDS),
    "explained_variance": lambda f: f(X, X, M),
    "adaptive_kl_coef": lambda f: f(0.1, jnp.float32(0.2), target=0.1, horizon=100, n=4),
    "sum_finite": lambda f: f([jaxrl.Weighted(1.0, 1.0)]),
    "adaptive_lambda": lambda f: f([3, 40], 0.05),
    "whiten_groups": lambda f: f(X, M, IDS, 2, eps=0),
    "sequence_log_ratio": lambda f: f(X, jnp.asarray(X), M, segment_ids=IDS),
    "within_bounds": lambda f: f(X, X, M, low=0, high=2, level="geometric", segment_ids=IDS),
    "overlong_penalty": lambda f: f(X, max_length=8, buffer=2),
    "ending_scores": lambda f: f(X, M, X, mode="soft", max_length=8, buffer=2),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_annotations_hold_for_what_goes_in_and_comes_out(name: str) -> None:
    CALLS[name](jaxtyped(typechecker=beartype)(getattr(jaxrl, name)))


def own_loss(x: Any, m: Any) -> Any:
    """Rewards to loss with nothing but the public names, as one jitted function."""
    rewards = jaxrl.token_rewards(x.sum(-1), m, kl=jaxrl.kl_estimate(x, 0.9 * x), kl_coef=0.1)
    a, returns = jaxrl.gae(rewards, x, m)
    a = jaxrl.whiten(a, m)
    policy = jaxrl.ppo_policy_loss(x, 0.9 * x, a, mask=m)
    value = jaxrl.ppo_value_loss(x, 0.9 * x, returns, mask=m)
    weights = jaxrl.importance_weights(x, 0.9 * x, m)
    loss = jaxrl.aggregate(weights * policy.per_token + value.per_token, m, mode="token-mean")
    return loss + jaxrl.explained_variance(x, returns, m) + jaxrl.masked_mean(policy.clipped, m)


def test_the_functions_compose_under_jit_and_grad() -> None:
    x = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    m = np.arange(7)[None] < np.array([[7], [3], [0]])
    value, g = jax.jit(jax.value_and_grad(own_loss))(np.where(m, x, 0), m)
    assert np.isfinite(value) and np.isfinite(g).all() and np.any(g)


def test_arrays_of_other_ranks_are_never_broadcast() -> None:
    assert jax.config.jax_numpy_rank_promotion == "raise"
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.zeros((2, 3)) + jnp.zeros(3)

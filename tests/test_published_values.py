"""Values that other projects' own tests publish, and those of JAX libraries, case by case."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import (
    aggregate,
    explained_variance,
    gae,
    group_advantages,
    importance_weights,
    kl_estimate,
    masked_mean,
    ppo_policy_loss,
    token_logprobs_and_entropy,
    token_rewards,
    whiten,
)
from jaxrl.packing import pack, plan
from jaxrl.steps import Forward, policy_outputs, predicting_hidden
from jaxrl.types import Prompt, Trajectory

DATA = Path(__file__).parent / "data"
JAX_CASES = json.loads((DATA / "jax_peer_values.json").read_text(encoding="utf-8"))["cases"]
PUBLISHED = json.loads((DATA / "peer_values.json").read_text(encoding="utf-8"))["published"]


def close(got: Any, expected: Any, where: Any = True, **tolerance: float) -> None:
    """Equal where `where`: by default to 2e-5, or as precisely as the source prints its digits."""
    got, expected = np.asarray(got, float), np.asarray(expected, float)
    assert got.shape == expected.shape
    where = np.broadcast_to(where, got.shape)
    np.testing.assert_allclose(
        got[where], expected[where], **({"atol": 2e-5, "rtol": 2e-5} | tolerance)
    )


# --- JAX libraries ---

RECIPES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {}
FRACTIONS = "scales by a fractional mask; here a float mask is a TypeError"
REFUSED = {"kl_masked_nan": FRACTIONS}


def recipe(*kinds: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        RECIPES.update(dict.fromkeys(kinds, function))
        return function

    return register


def array(x: Any) -> np.ndarray:
    return np.asarray(x, float)


@recipe("gae_bootstrap")
def _(x: dict) -> dict:
    """The last value is the bootstrap; a discount of 0 ends an episode inside the row."""
    v = array(x["values_T_plus_1"])
    before, after = v[:, :-1], v[:, -1:]
    options = {"gamma": array(x["discounts"]), "lam": x["lambda"], "bootstrap": after}
    return {"advantages": gae(x["rewards"], before, before == before, **options).advantages}


@recipe("gae", "gae_mask_convention")
def _(x: dict) -> dict:
    """Masked positions are passed over, or run through like steps."""
    m = array(x["mask"]) != 0
    steps = np.ones_like(m) if x.get("convention") == "run_through" else m
    a, returns = gae(x["rewards"], x["values"], steps, gamma=x["gamma"], lam=x["lambda"])
    white = whiten(a, m, ddof=1)
    return {
        "advantages_raw": (a, m),
        "returns": (returns, steps),
        "advantages_whitened": (white, m),
    }


@recipe("reward_placement")
def _(x: dict) -> dict:
    response = np.arange(x["length"])[None] <= array(x["last_index"])[:, None]
    return {"token_rewards": token_rewards(x["scores"], response)}


@recipe("masked_mean", "masked_var_unbiased")
def _(x: dict) -> dict:
    values, m = array(x["x"]), array(x["mask"]) != 0
    mean, n = masked_mean(values, m), m.sum()
    return {"mean": mean, "var": masked_mean((values - mean) ** 2, m) * n / (n - 1)}


@recipe("policy_loss_clip")
def _(x: dict) -> dict:
    clips = {"clip_low": x.get("epsilon", 0.2), "clip_high": x.get("epsilon", 0.2)}
    if "logits" in x:
        actions = np.asarray(x["actions"])[..., None]
        pick = lambda z: jnp.take_along_axis(jax.nn.log_softmax(array(z)), actions, -1)[..., 0]  # noqa: E731
        loss = ppo_policy_loss(pick(x["logits"]), pick(x["old_logits"]), x["advantages"], **clips)
    else:
        loss = ppo_policy_loss(x["logprobs"], x["old_logprobs"], x["advantages"], **clips)
    per_token = loss.per_token
    return {"loss_mean_per_row": per_token.mean(-1), "ratio": loss.ratio, "token_losses": per_token}


@recipe("policy_loss_cispo")
def _(x: dict) -> dict:
    new, a = array(x["logprobs"]), array(x["advantages"])
    weights = importance_weights(new, x["old_logprobs"], new == new, cap=1 + x["clip_high"])
    return {"sum": -(jnp.maximum(weights, 1 - x["clip_low"]) * a * new).sum()}


@recipe("aggregate_loss")
def _(x: dict) -> dict:
    """Some of the peer's modes divide by a constant; `horizon` is then that constant."""
    loss, m = array(x["token_losses"]), array(x["mask"]) != 0
    mode, horizon = x["mode"].replace("sequence-", "seq-"), x.get("norm")
    if mode == "seq-mean-token-scale":
        mode, horizon = "seq-mean-token-sum-norm", m.size
    return {"loss": aggregate(loss, m, mode=mode, horizon=horizon)}


@recipe("rloo", "grpo")
def _(x: dict) -> dict:
    ids = np.asarray(x.get("groups", np.arange(len(x["rewards"])) // x.get("group_size", 1)))
    scale = "none" if "groups" in x else "loo"
    return {"advantages": group_advantages(x["rewards"], ids, int(ids.max()) + 1, scale=scale)}


@recipe("logprobs")
def _(x: dict) -> dict:
    head = np.eye(len(x["logits"][0][0]), dtype=np.float32)
    logits, ids = np.asarray(x["logits"], np.float32), np.asarray(x["ids"])
    logprobs, entropy = token_logprobs_and_entropy(logits, head, ids, temperature=x["temperature"])
    return {"logprobs": logprobs, "entropy": entropy}


@pytest.mark.parametrize(
    "case", [c for c in JAX_CASES if c["id"] not in REFUSED], ids=lambda c: c["id"]
)
def test_jax_libraries_are_reproduced(case: dict[str, Any]) -> None:
    ours = RECIPES[case["kind"]](case["inputs"])
    for name, expected in case["expected"].items():
        got = ours[name]
        value, where = got if isinstance(got, tuple) else (got, True)
        close(value, expected, where, atol=case["atol"], rtol=case["rtol"])


def test_every_jax_case_is_reproduced_or_refused() -> None:
    assert {c["kind"] for c in JAX_CASES if c["id"] not in REFUSED} == RECIPES.keys()
    assert len(JAX_CASES) == 23
    (fractional,) = [c["inputs"] for c in JAX_CASES if c["id"] in REFUSED]
    with pytest.raises(TypeError, match="mask has dtype float64"):
        kl_estimate(
            fractional["logprobs"], array(fractional["ref_logprobs"]), mask=fractional["mask"]
        )


# --- values in the tests of other projects ---


def published(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    (case,) = [c for c in PUBLISHED if name in f"{c['peer']} {c['test']}"]
    return case["inputs"], case["expected"]


@pytest.mark.parametrize("name", ["lambda_one", "flat_critic", "gamma_discount"])
def test_unirl_gae(name: str) -> None:
    x, y = published(name)
    a, returns = gae(
        x["rewards"], x["values"], [1] * len(x["values"]), gamma=x["gamma"], lam=x["gae_lambda"]
    )
    close(a, y["advantages"])
    close(returns, y.get("returns", returns))


def test_unirl_places_scores_of_packed_trajectories() -> None:
    x, y = published("scatter_terminal_rewards_packed")
    ids = np.repeat([0, 1], x["lengths"])
    close(token_rewards(array(x["rewards"])[ids], [1, 1, 1], segment_ids=ids), y["token_rewards"])


def test_unirl_shape_mismatch() -> None:
    x, _ = published("shape_mismatch")
    with pytest.raises(ValueError, match="shape"):
        gae(x["rewards"], x["values"], [1, 1, 1])


def test_unirl_claim_that_contradicts_its_formula_is_refused() -> None:
    # With nothing after the last step, its δ is 1 + 0 − 2 = −1 and not 0.
    x, y = published("uniform_reward_zero_advantage")
    a = gae(x["rewards"], x["values"], [1, 1, 1], gamma=x["gamma"], lam=x["gae_lambda"]).advantages
    close(a[-1], -1.0)
    assert not np.allclose(a, y["advantages_claimed"])


def test_verl_multi_turn_ignores_the_values_of_masked_tokens() -> None:
    x, _ = published("multi_turn_compute_gae")
    m = np.asarray(x["response_mask"])
    results = []
    for filler in (0.0, 88.0, -1e30, np.nan):
        v = np.full(m.shape, filler)
        v[0, [int(t) for t in x["values_valid"]]] = list(x["values_valid"].values())
        results.append(gae(x["rewards"], v, m, gamma=0.97, lam=0.6))
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, results[0])


def test_trl_mean_variance_whitening() -> None:
    x, y = published("masked_mean/var/whiten")
    v, m = array(x["test_input"]), np.asarray(x["test_mask"])
    close(masked_mean(v, m), y["mean"])
    close(masked_mean((v - 2.5) ** 2, m) * 2, y["var_unbiased"])
    close(whiten(v, m, ddof=1)[1:3], y["whitened_valid"])
    close(whiten(x["test_input_unmasked"], [1, 1], ddof=1), y["whitened_valid"])


def test_openrlhf_global_sequence_mean() -> None:
    x, y = published("seq_mean_token_mean_aggregation")
    close(aggregate(x["loss"], x["mask"], mode="seq-mean-token-mean"), y["global_seq_mean"])
    parts = [
        aggregate(x["loss"][r], x["mask"][r], mode="seq-mean-token-mean", denominator=3)
        for r in (slice(0, 2), slice(2, 3))
    ]
    close(sum(parts), y["global_seq_mean"])


def test_openrlhf_token_mean_over_ranks_equals_the_full_batch() -> None:
    x, _ = published("policy_loss_token_mean")
    new = array(x["log_probs"])
    loss = ppo_policy_loss(new, new - array(x["delta_new_minus_old"]), x["advantages"]).per_token
    m = np.asarray(x["mask"])
    cut = x["split"][0]
    ranks = [
        2 * aggregate(loss[r], m[r], mode="token-mean", denominator=m.sum())
        for r in (slice(0, cut), slice(cut, None))
    ]
    close(sum(ranks) / 2, aggregate(loss, m, mode="token-mean"))


def test_openrlhf_kl_metric_is_not_clamped() -> None:
    x, y = published("kl_metric_is_not_clamped")
    close(kl_estimate(x["old"], x["log_probs"])[0, 0], y["ppo_kl"])


def test_slime_dual_clip() -> None:
    x, y = published("tests/test_policy_loss.py")
    loss = ppo_policy_loss(
        np.log(x["ratios"]), np.zeros(3), x["advantages"], dual_clip=x["eps_clip_c"]
    )
    close(loss.per_token, y["losses"])


def test_slime_values_are_not_tempered_and_read_before_their_token() -> None:
    x, y = published("tests/test_value_temperature.py")
    total, response = x["total_length"], x["response_length"]
    told = Trajectory(
        prompt=Prompt(row=0, ids=(0,) * (total - response), text="", columns={}),
        sample=0,
        response_ids=(0,) * response,
        logprobs=(-1.0,) * response,
        finish_reason="stop",
    )
    layout = plan([2], [2], [2], updates=1, micro_batch_tokens=total, row_lengths=[total])
    packed = jax.tree.map(lambda a: jnp.asarray(a)[0, 0], pack([told], layout))
    head = lambda value_params, hidden, rows: predicting_hidden(hidden, rows)[..., 0]  # noqa: E731
    logits = jnp.asarray(x["value_logits"], jnp.float32)[None, :, None]
    forward = Forward(lambda *_: logits, lambda _: jnp.ones((1, 4)), head)
    _, _, values = policy_outputs(
        forward, {}, {}, packed, chunk_size=None, temperature=x["rollout_temperature"]
    )
    close(values[np.asarray(packed.policy_valid)], y["values"])


def test_nemo_gae_without_lambda() -> None:
    x, y = published("test_gae_gamma_lambda_zero")
    rewards = token_rewards(x["rewards"], x["mask"])
    close(
        gae(rewards, x["values"], x["mask"], gamma=x["gamma"], lam=x["lam"]).advantages,
        y["advantages"],
    )


def test_nemo_explained_variance_from_its_moments() -> None:
    # Two returns of mean 1 and mean square 5; residuals with mean 0.5 and mean square 1.25.
    x, y = published("compute_critic_metrics")
    returns, residuals = np.array([-1.0, 3.0]), np.array([-0.5, 1.5])
    close([returns.mean(), (returns**2).mean()], [x["returns_mean"], x["returns_sq_mean"]])
    close((residuals**2).mean(), x["residual_sq_mean"])
    every = np.ones(2, bool)
    close(explained_variance(returns - residuals, returns, every), y["explained_var"])
    # Without variance theirs says 1 when the critic is exact; here it says 0, as nothing varies.
    close(explained_variance([1.0, 1.0], [1.0, 1.0], every), 0.0)


def test_nemo_and_skyrl_dual_clip() -> None:
    x, y = published("clipped_pg_loss_dual_clip")
    loss = ppo_policy_loss(
        x["curr_logprobs"],
        x["prev_logprobs"],
        x["advantages"],
        clip_low=x["clip"],
        clip_high=x["clip"],
        dual_clip=x["c"],
    )
    close(loss.per_token, y["per_token"])
    close(loss.per_token.mean(), y["mean"])
    assert loss.dual_clipped.tolist() == [[False, False, True]]


@pytest.mark.parametrize(
    ("gamma", "lam", "name"), [(1, 1, "g1_l1"), (0.5, 1, "g0p5_l1"), (1, 0.5, "g1_l0p5")]
)
def test_skyrl_gae(gamma: float, lam: float, name: str) -> None:
    x, y = published("test_ppo_utils.py (GAE)")
    a, returns = gae(x["rewards"], x["values"], [[1, 1, 1]], gamma=gamma, lam=lam)
    close(returns, y[f"returns_{name}"])
    if name == "g1_l1":
        m = np.array([[True, False, True]])
        close(whiten(a, m, ddof=1), y["whitened_mask_101"], where=m, atol=1e-4)


def test_skyrl_returns_without_a_critic() -> None:
    # Theirs keeps what stood at the masked position; compared at the valid ones.
    x, y = published("(REINFORCE++)")
    m = np.asarray(x["mask"]) != 0
    returns = gae(x["rewards"], np.zeros((1, 3)), m, gamma=x["gamma"], lam=1.0).returns
    close(returns, y["returns"], where=m)


def test_skyrl_groups() -> None:
    x, y = published("(GRPO no std)")
    close(group_advantages(x["scores"], x["groups"], 2, scale="none"), y["advantages"])


def test_skyrl_cispo() -> None:
    x, y = published("policy_loss_cispo")
    case = {"logprobs": x["new"], "old_logprobs": x["old"], "advantages": x["advantages"]}
    ours = RECIPES["policy_loss_cispo"](case | {"clip_low": x["clip"], "clip_high": x["clip"]})
    close(ours["sum"], y["loss_sum"], atol=1e-3)


def test_miles_extreme_log_ratios() -> None:
    # NaN stays visible here, so theirs is compared at the other four.
    x, _ = published("ratio_numerics")
    new, advantages = -array(x["ppo_kl"]), array(x["advantages"])
    loss = ppo_policy_loss(new, 0 * advantages, advantages)
    where = ~np.isnan(new)
    close(loss.per_token, 0 * advantages, where)
    assert not loss.clipped.any()
    k3 = kl_estimate(new, 0 * advantages, kind="k3")
    assert np.isfinite(k3[:2]).all() and np.isnan(k3[2])


def test_every_published_value_is_used() -> None:
    names = {
        n.args[0].value
        for n in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
        if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "published"
        if isinstance(n.args[0], ast.Constant)
    } | {"lambda_one", "flat_critic", "gamma_discount"}
    unused = [c for c in PUBLISHED if not any(n in f"{c['peer']} {c['test']}" for n in names)]
    assert not unused and len(PUBLISHED) == 21

"""CF-04: every setting changes something that is computed; none is parsed and then forgotten.

Settings of the algorithm, of the shaping of rewards, of packing and of optimizers are flipped one
at a time; of the others it is checked that the code reads them, and what they do is a matter for
the tests of the rooms that read them.
"""

from __future__ import annotations

import ast
import dataclasses
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from iterating import iterations, made_up, toy_config, toy_state
from stepping import lay_out, make_trajectories, one

from jaxrl.config import CriticConfig
from jaxrl.config_schema import settings
from jaxrl.critic import make_forward
from jaxrl.cursor import PromptCursor
from jaxrl.errors import TrainingError
from jaxrl.rollouts import Rollouts
from jaxrl.scoring import Scores
from jaxrl.state import make_optimizers
from jaxrl.trainer import _check_health
from jaxrl.types import Prompt, Sampling, Trajectory

ROOT = Path(__file__).parents[1]

FLIPS = {
    # key: what else is set with it and without it, and the value
    "algorithm.advantage_mode": ("", "grpo"),
    "algorithm.gamma": ("", 0.9),
    "algorithm.lam": ("", 0.5),
    "algorithm.lam_alpha": ("", 0.3),
    "algorithm.value_lam": ("", 0.3),
    "algorithm.gae_over": ("", "response"),
    "algorithm.group_scale": ("algorithm.advantage_mode=grpo", "none"),
    "algorithm.whiten": ("", "off"),
    "algorithm.truncated": ("", "zero"),
    "algorithm.overlong_buffer": ("algorithm.truncated=soft algorithm.overlong_buffer=4", 2),
    "algorithm.overlong_penalty": ("algorithm.truncated=soft algorithm.overlong_buffer=4", 0.5),
    "algorithm.missing_eos_penalty": ("", 0.5),
    "algorithm.ratio_level": ("", "sequence"),
    "algorithm.clip_low": ("algorithm.epochs=2", 0.01),
    "algorithm.clip_high": ("algorithm.epochs=2", 0.01),
    "algorithm.dual_clip": ("algorithm.old_logprobs=rollout", 1.1),
    "algorithm.entropy_coef": ("", 0.1),
    "algorithm.nll_coef": ("", 0.1),
    "algorithm.nll_above": ("algorithm.nll_coef=0.1", 1.0),
    "algorithm.kl_in": ("", "reward"),
    "algorithm.kl_kind": ("algorithm.kl_in=reward", "k3"),
    "algorithm.kl_weighted": (
        "algorithm.kl_in=loss algorithm.kl_kind=k2 algorithm.epochs=2",
        "true",
    ),
    "algorithm.kl_coef": ("algorithm.kl_in=reward", 0.5),
    "algorithm.kl_target": ("algorithm.kl_in=reward algorithm.kl_horizon=10", 0.01),
    "algorithm.kl_horizon": ("algorithm.kl_in=reward algorithm.kl_target=0.01", 10),
    "algorithm.value_clip": ("algorithm.epochs=2", 0.01),
    "algorithm.value_coef": ("", 0.1),
    "algorithm.old_logprobs": ("", "rollout"),
    "algorithm.importance": ("", "token"),
    "algorithm.importance_cap": ("algorithm.importance=token", 0.5),
    "algorithm.rejection": ("", "token"),
    "algorithm.rejection_low": ("algorithm.rejection=token", 0.95),
    "algorithm.rejection_high": ("algorithm.rejection=token", 1.05),
    "algorithm.aggregation": ("", "seq-mean-token-mean"),
    "algorithm.epochs": ("", 2),
    "algorithm.updates": ("", 2),
    "critic.warmup_iterations": ("", 1),
    "reward.normalise": ("", "std"),
    "reward.scale": ("", 2.0),
    "reward.shift": ("", 0.5),
    "reward.clip": ("", 0.5),
    "rollout.temperature": ("", 1.3),
    "rollout.max_new_tokens": ("algorithm.aggregation=seq-mean-token-sum-norm", 16),
    "packing.micro_batch_tokens": ("", 48),
    "packing.row_lengths": ("", "[32]"),
    "packing.share_prompts": ("", "false"),
}

OPTIMIZER_FLIPS = {
    "lr": ("", 0.01),
    "schedule": ("iterations=3", "linear"),
    "warmup_steps": ("", 2),
    "min_lr_ratio": ("iterations=3 {}.schedule=linear", 0.5),
    "beta1": ("", 0.5),
    "beta2": ("", 0.5),
    "eps": ("", 0.1),
    "weight_decay": ("", 0.1),
    "max_grad_norm": ("", 0),
}


FLIPPED_ELSEWHERE = {
    "algorithm.max_skipped_in_a_row",
    "critic.trunk_gradient",
    "rollout.dynamic_sampling",
    "rollout.max_rounds",
}
"""By tests of their own below."""

SETTINGS_ROOMS = "config_"
"""Files that parse and check settings: to be read there is not to be used."""


def test_cf04_no_setting_of_these_sections_is_left_out() -> None:
    optimizers = {f"optim.{t}.{name}" for t in ("policy", "value") for name in OPTIMIZER_FLIPS}
    covered = FLIPS.keys() | optimizers | FLIPPED_ELSEWHERE
    keys = {s.key for s in settings()}
    shaping = {f"reward.{name}" for name in ("normalise", "scale", "shift", "clip")}
    wanted = {k for k in keys if k.startswith(("algorithm.", "optim.", "packing."))} | shaping
    assert wanted <= covered <= keys


def test_cf04_every_setting_is_read_by_the_code_that_it_is_for() -> None:
    package = ROOT / "jaxrl"
    read: set[str] = set()
    for path in package.rglob("*.py"):
        if not path.relative_to(package).as_posix().startswith(SETTINGS_ROOMS):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            read |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names = {s.key: s.key.rsplit(".", 1)[-1] for s in settings()}
    assert not {key for key, name in names.items() if name not in read}


@cache
def after_an_iteration(*overrides: str) -> list[np.ndarray]:
    """All metrics and the parameters after an iteration of the toy: what a setting can change."""
    # Operation by operation, since a compilation for each setting would take minutes.
    with jax.disable_jit():
        state, metrics = iterations(toy_config(*overrides), [made_up(12)])
    names = sorted(metrics[0])
    leaves = jax.tree.leaves((state.policy_params, state.value_params))
    values = np.array([metrics[0][name] for name in names])
    return [np.array([hash("".join(names))]), values, *(np.asarray(leaf) for leaf in leaves)]


def differ(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return any(
        a.shape != b.shape or (np.abs(a - b) > 1e-4 * (1 + np.abs(a))).any()
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("key", FLIPS)
def test_cf04_a_setting_changes_what_is_computed(key: str) -> None:
    base, value = FLIPS[key]
    without = after_an_iteration(*base.split())
    assert all(np.isfinite(leaf).all() for leaf in without[2:])
    assert differ(without, after_an_iteration(*base.split(), f"{key}={value}"))


def test_the_same_settings_change_nothing() -> None:
    """What is compared has no noise of its own."""
    again = after_an_iteration("seed=0")
    assert not differ(after_an_iteration(), again)


def moved(tree: str, *overrides: str) -> list[np.ndarray]:
    """A kernel after three steps with gradients of changing size."""
    optimizer = getattr(make_optimizers(toy_config(*overrides)), tree)
    params = {"kernel": jnp.array([1.0, -2.0, 0.5])}
    state, seen = optimizer.init(params), []
    for gradient in ([3.0, 1.0, 0.0], [-1.0, 0.1, 0.2], [0.5, 2.0, -0.1]):
        updates, state = optimizer.update({"kernel": jnp.array(gradient)}, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(np.asarray(params["kernel"]))
    return seen


@pytest.mark.parametrize("tree", ["policy", "value"])
@pytest.mark.parametrize("name", OPTIMIZER_FLIPS)
def test_cf04_an_optimizers_setting_changes_its_steps(tree: str, name: str) -> None:
    base, value = OPTIMIZER_FLIPS[name]
    settings = base.format(f"optim.{tree}").split()
    flipped = moved(tree, *settings, f"optim.{tree}.{name}={value}")
    assert differ(moved(tree, *settings), flipped)


def test_cf04_the_run_stops_after_so_many_skipped_updates() -> None:
    state = dataclasses.replace(toy_state(toy_config()), skipped_in_a_row=jnp.int32(2))
    _check_health(toy_config("algorithm.max_skipped_in_a_row=3"), state)
    with pytest.raises(TrainingError, match="max_skipped_in_a_row=2"):
        _check_health(toy_config("algorithm.max_skipped_in_a_row=2"), state)


@pytest.mark.parametrize("reaches", [True, False])
def test_cf04_the_value_loss_reaches_the_trunk_or_not(reaches: bool) -> None:
    """critic.trunk_gradient: the head's gradient is there either way, the trunk's as it says."""
    model: Any = SimpleNamespace(
        hidden=None, head=None, mesh=None, config=SimpleNamespace(tie_word_embeddings=False)
    )
    forward = make_forward(model, CriticConfig(trunk_gradient=reaches))
    assert forward.values is not None
    packed = one(one(lay_out(make_trajectories(4))))
    hidden = jnp.ones((*packed.tokens.shape, 3))
    head = {"value_head": {"kernel": jnp.ones((3, 1)), "bias": jnp.zeros(1)}}

    def total(head: Any, hidden: jax.Array) -> jax.Array:
        return forward.values(head, hidden, packed).sum()  # type: ignore[misc]

    of_head: Any
    of_head, of_hidden = jax.grad(total, argnums=(0, 1))(head, hidden)
    assert np.abs(of_head["value_head"]["kernel"]).min() > 0
    assert bool(np.abs(of_hidden).max() > 0) is reaches


class Answers:
    """An engine that says the same to every prompt."""

    def generate(self, prompts: list[Prompt], *, samples: int, **_: Any) -> list[Trajectory]:
        return [
            Trajectory(
                prompt=prompt, sample=i, response_ids=(1,), logprobs=(-1.0,), finish_reason="stop"
            )
            for prompt in prompts
            for i in range(samples)
        ]


def rows_of_a_batch(*overrides: str) -> list[int]:
    """Rows of two prompts out of ten, of which only every third has samples that differ."""
    prompts = [Prompt(row=i, ids=(i,), text="", columns={}) for i in range(10)]

    def score(trajectories: Any) -> Scores:
        values = [float(t.sample) if t.prompt.row % 3 == 2 else 1.0 for t in trajectories]
        return Scores(np.array(values, np.float32), np.ones(len(values), bool), {})

    engine: Any = Answers()
    rollouts = Rollouts(
        toy_config("rollout.prompts=2", *overrides),
        engine,
        PromptCursor(prompts, seed=0, shuffle=False),
        Sampling(max_new_tokens=1),
        score,
    )
    return [prompt.row for prompt in rollouts.take(0).prompts]


def test_cf04_dynamic_sampling_goes_on_to_prompts_with_spread_for_so_many_rounds() -> None:
    dynamic = "rollout.dynamic_sampling=true"
    assert rows_of_a_batch() == [0, 1]
    # Rounds take 0 and 1, then 2 and 3, then what is missing one at a time: 4, then 5.
    assert rows_of_a_batch(dynamic) == [2, 5]
    # Two rounds find one; the first group without spread fills the batch.
    assert rows_of_a_batch(dynamic, "rollout.max_rounds=2") == [0, 2]

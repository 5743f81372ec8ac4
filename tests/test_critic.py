"""Where the critic starts: zero, or a reward model's scores at every position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers

from jaxrl import setup
from jaxrl.checkpoint.hf import load_hf_config
from jaxrl.checkpoint.hf_classifier import export_critic
from jaxrl.config import Config
from jaxrl.config_io import load_config
from jaxrl.critic import make_forward
from jaxrl.errors import ConfigError, ConversionError
from jaxrl.models import Model, ModelConfig
from jaxrl.sharding import make_mesh
from jaxrl.state import fresh_state, make_optimizers
from jaxrl.steps import row_inputs
from jaxrl.types import Trajectory
from tests.classifiers import save_model
from tests.stepping import lay_out, make_trajectories

Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A policy, two classifiers and another language model of its shape, and a wider classifier."""
    made = {
        "policy": dict(kind="lm", tie_word_embeddings=True),
        "lm": dict(kind="lm", tie_word_embeddings=False),
        "rm": dict(),
        "two": dict(num_labels=2),
        "wide": dict(intermediate_size=64),
    }
    folders = {name: tmp_path_factory.mktemp(name) for name in made}
    for name, settings in made.items():
        save_model(folders[name], **settings)
    return folders


def configure(folders: Folders, *overrides: str) -> Config:
    needed = ["data.train.path=x.jsonl", "reward.functions=[{fn: m:f}]"]
    return load_config([], [f"model.path={folders['policy']}", *needed, *overrides])


def start(config: Config) -> tuple[Model, Any]:
    model = Model(ModelConfig.from_hf(load_hf_config(config.model.path)), remat="none")
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    return model, fresh_state(config, model, mesh, make_optimizers(config))


def first_values(config: Config, trajectories: list[Trajectory]) -> list[np.ndarray]:
    """Value of the state before each policy token of each trajectory, at the start."""
    model, state = start(config)
    return values_of(config, model, state.policy_params, state.value_params, trajectories)


def values_of(
    config: Config, model: Model, policy: Any, value: Any, trajectories: list[Trajectory]
) -> list[np.ndarray]:
    forward = make_forward(model, config.critic)
    assert forward.values is not None
    packed = lay_out(trajectories, tokens=256)
    packed = jax.tree.map(lambda x: x[0, 0], packed)
    hidden = model.hidden(policy, *row_inputs(packed))
    values = np.asarray(forward.values(value, hidden, packed))
    valid, index = np.asarray(packed.policy_valid), np.asarray(packed.trajectory)
    return [values[valid & (index == i)] for i in range(len(trajectories))]


def scores_at_every_position(folder: Path, trajectory: Trajectory) -> np.ndarray:
    """The classifier's score of the text up to each policy token, by transformers."""
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = None
    scores = []
    for at, own in enumerate(trajectory.mask):
        if own:
            before = trajectory.ids[: len(trajectory.prompt.ids) + at]
            with torch.no_grad():
                scores.append(float(model(torch.tensor([before])).logits[0, 0]))
    return np.array(scores)


def test_a_kept_head_gives_the_classifiers_score_of_the_text_so_far(folders: Folders) -> None:
    keys = ["critic.kind=model", f"critic.path={folders['rm']}", "critic.keep_head=true"]
    trajectories = make_trajectories(4)
    ours = first_values(configure(folders, *keys), trajectories)
    assert sum(map(len, ours)) > 8
    for trajectory, values in zip(trajectories, ours, strict=True):
        expected = scores_at_every_position(folders["rm"], trajectory)
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)
        assert np.abs(expected).max() > 1e-2


def test_a_run_starts_with_the_values_that_an_earlier_critic_ended_with(
    folders: Folders, tmp_path: Path
) -> None:
    trajectories = make_trajectories(4)
    config = configure(folders, "critic.kind=model", f"critic.path={folders['lm']}")
    model, state = start(config)
    head = {"kernel": np.linspace(-1, 1, 32, dtype=np.float32)[:, None], "bias": np.float32([0.7])}
    ended = {**state.value_params, "value_head": head}
    export_critic(tmp_path / "critic", ended["trunk"], head, model.config)
    keys = ["critic.kind=model", f"critic.path={tmp_path / 'critic'}"]
    kept = first_values(configure(folders, *keys, "critic.keep_head=true"), trajectories)
    expected = values_of(config, model, state.policy_params, ended, trajectories)
    assert np.abs(np.concatenate(expected)).max() > 0.1
    for one, other in zip(kept, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    for values in first_values(configure(folders, *keys), trajectories):
        np.testing.assert_array_equal(values, 0.0)


@pytest.mark.parametrize(
    "keys",
    [
        ["critic.kind=head"],
        ["critic.kind=model"],
        ["critic.kind=model", "critic.path={lm}"],
        ["critic.kind=model", "critic.path={rm}"],
    ],
)
def test_otherwise_every_first_value_is_exactly_zero(folders: Folders, keys: list[str]) -> None:
    config = configure(folders, *(key.format(**folders) for key in keys))
    for values in first_values(config, make_trajectories(4)):
        np.testing.assert_array_equal(values, 0.0)


@pytest.mark.parametrize("source", ["policy", "lm", "rm"])
def test_the_trunk_is_the_one_that_was_named(folders: Folders, source: str) -> None:
    path = "" if source == "policy" else f"critic.path={folders[source]}"
    _, state = start(configure(folders, "critic.kind=model", *filter(None, [path])))
    auto: Any = (
        transformers.AutoModelForSequenceClassification
        if source == "rm"
        else transformers.AutoModelForCausalLM
    )
    expected = auto.from_pretrained(folders[source]).state_dict()["model.embed_tokens.weight"]
    trunk = state.value_params["trunk"]
    np.testing.assert_array_equal(trunk["embed"]["weight"], expected.numpy())
    assert set(trunk) == {"embed", "layers", "norm"}
    assert set(state.value_params) == {"value_head", "trunk"}
    np.testing.assert_array_equal(state.value_params["value_head"]["bias"], [0.0])


@pytest.mark.parametrize(
    ("critic", "error", "message"),
    [
        (["critic.path={wide}"], ConfigError, "must have the policy's architecture"),
        (["critic.path={two}"], ConversionError, "2 labels"),
        (
            ["critic.path={lm}", "critic.keep_head=true"],
            ConfigError,
            "critic.keep_head=true, but critic.path={lm} is a language model without a score",
        ),
    ],
)
def test_a_critic_that_cannot_be_is_found_before_anything_is_loaded(
    folders: Folders, critic: list[str], error: type[Exception], message: str
) -> None:
    keys = ["critic.kind=model", *(key.format(**folders) for key in critic)]
    with pytest.raises(error, match=message.format(**folders)):
        setup.build(configure(folders, *keys))

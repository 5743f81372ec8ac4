"""Rules of episodes and dynamic sampling: each broken one is named with its value and the fix."""

from __future__ import annotations

import pytest

from jaxrl.config import Config, DataConfig, RolloutConfig
from jaxrl.config_rollout_checks import rollout_rules


def problems(**settings: object) -> list[str]:
    return list(rollout_rules(Config(data=DataConfig(), rollout=RolloutConfig(**settings))))  # type: ignore[arg-type]


def test_the_defaults_and_whole_settings_are_in_order():
    assert problems() == []
    assert problems(env="a.b:c.d", max_turns=1, max_turn_tokens=128, env_timeout_s=1.0) == []
    assert problems(dynamic_sampling=True, max_rounds=2, samples=2) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"env": "no_colon"}, "rollout.env='no_colon' must read module:function"),
        ({"env": "a:b", "max_turn_tokens": 129}, "max_turn_tokens=129 must be at most"),
        ({"max_turns": 3}, "rollout.max_turns=3 is read with rollout.env only"),
        ({"max_turn_tokens": 3}, "rollout.max_turn_tokens=3 is read with rollout.env only.* null"),
        ({"env_timeout_s": 3.0}, "rollout.env_timeout_s=3.0 is read with rollout.env only"),
        ({"max_rounds": 2}, "rollout.max_rounds=2 is read with rollout.dynamic_sampling=true only"),
        ({"dynamic_sampling": True, "samples": 1}, "rollout.samples=1 .* needs at least 2"),
        ({"dynamic_sampling": True, "max_rounds": 1}, "rollout.max_rounds=1 .* at least 2"),
    ],
)
def test_a_broken_rule_is_named(settings: dict[str, object], said: str):
    (problem,) = problems(**settings)
    with pytest.raises(ValueError, match=said):
        raise ValueError(problem)

"""From settings to everything a run needs; all that can be wrong with the input is found here.

Order: settings, files, prompts, reward functions, then arrays. Nothing is computed before all of
    the first four are known to be good.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxrl.checkpoint.hf import check_tokenizer_fits, load_hf_config
from jaxrl.checkpoint.hf_classifier import load_trunk_config
from jaxrl.config import Config, CriticConfig
from jaxrl.config_checks import check_config
from jaxrl.continuation import Continuation
from jaxrl.data import PromptCursor, load_prompts, load_tokenizer
from jaxrl.environment import Environment
from jaxrl.episodes import Stage
from jaxrl.errors import ConfigError
from jaxrl.models import Model, ModelConfig
from jaxrl.named_function import load_function
from jaxrl.processes import ALONE, Peers, share_of
from jaxrl.prompts import chat_template
from jaxrl.rollout.engine import RolloutEngine
from jaxrl.rollout.trainside import TrainsideEngine
from jaxrl.rollouts import Rollouts
from jaxrl.scoring import Scorer, Scores, score_trajectories
from jaxrl.sharding import make_mesh, own_mesh
from jaxrl.state import Optimizers, make_optimizers
from jaxrl.train_steps import Steps, make_model, make_steps
from jaxrl.types import Prompt, Sampling, Trajectory

__all__ = ["Run", "build"]


@dataclass(frozen=True)
class Run:
    """Everything but the state that changes."""

    config: Config
    model: Model
    tokenizer: Any
    mesh: Mesh
    cursor: PromptCursor
    rollouts: Rollouts
    eval_prompts: list[Prompt]
    prompt_counts: dict[str, int]
    scorer: Scorer
    score: Callable[[Sequence[Trajectory]], Scores]
    engine: RolloutEngine
    steps: Steps
    optimizers: Optimizers
    sampling: Sampling
    eval_sampling: Sampling
    stage: Stage | None = None
    """Environment of episodes, if there is one."""
    peers: Peers = ALONE
    """Processes that share the run."""

    def close(self) -> None:
        """End the reward worker, and engine and environment with what they have under way."""
        self.scorer.close()
        self.engine.close()
        if self.stage:
            self.stage.environment.close()
        self.rollouts.close()


def build(config: Config, peers: Peers = ALONE) -> Run:
    """Check everything, load the tokenizer and prompts, and make the steps."""
    check_config(config)
    _check_peers(config, peers)
    if peers.leads:
        _make_model_folder(config)
    peers.exchange("the model's folder is there", None)
    folder = config.model.path
    model_config = ModelConfig.from_hf(load_hf_config(folder))
    if config.critic.path and config.needs_critic:
        _check_critic(config.critic, model_config)
    tokenizer = load_tokenizer(folder)
    check_tokenizer_fits(tokenizer, model_config)
    vocab = model_config.vocab_size
    prompts, counts = load_prompts(config.data.train, tokenizer, config.data, vocab_size=vocab)
    held_out: list[Prompt] = []
    if config.data.eval is not None:
        held_out, _ = load_prompts(config.data.eval, tokenizer, config.data, vocab_size=vocab)
    sampling = _sampling(config, folder, tokenizer)
    mesh = make_mesh(config.mesh)
    model = make_model(config, model_config, mesh)
    optimizers = make_optimizers(config)
    steps = make_steps(config, model, mesh, optimizers)
    cursor = PromptCursor(prompts, seed=config.seed, shuffle=config.data.shuffle)
    with ExitStack() as started:  # ended again if what comes after fails
        stage = _stage(config, tokenizer)
        if stage:
            started.callback(stage.environment.close)
            stage.check([*prompts, *held_out])
        scorer = Scorer(config.reward, own_mesh(mesh))
        started.callback(scorer.close)
        scorer.probe([*prompts, *held_out])
        engine = _engine(config, model, folder, prompts, peers)
        started.pop_all()
    score = partial(score_trajectories, scorer, tokenizer)
    return Run(
        config=config,
        model=model,
        tokenizer=tokenizer,
        mesh=mesh,
        cursor=cursor,
        rollouts=Rollouts(config, engine, cursor, sampling, score, stage, peers),
        eval_prompts=held_out,
        prompt_counts=counts,
        scorer=scorer,
        score=score,
        engine=engine,
        steps=steps,
        optimizers=optimizers,
        sampling=sampling,
        eval_sampling=replace(
            sampling,
            max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens,
            temperature=config.eval.temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
        ),
        stage=stage,
        peers=peers,
    )


def _check_peers(config: Config, peers: Peers) -> None:
    """What only a run of one process can do."""
    rollout = config.rollout
    if peers.count == 1:
        return
    refused = {
        "rollout.env with rollout.engine=trainside": rollout.env and rollout.engine == "trainside",
        "rollout.router": rollout.router,
        "rollout.publish=tensor": rollout.engine == "sglang" and rollout.publish == "tensor",
    }
    for what, given in refused.items():
        if given:
            raise ConfigError(
                f"{what} is for a run of one process, and there are {peers.count}; use servers in "
                "rollout.urls (each process drives its share of them) and rollout.publish=disk"
            )
    if rollout.engine == "sglang" and len(rollout.urls) < peers.count:
        raise ConfigError(
            f"rollout.urls has {len(rollout.urls)} server(s) for {peers.count} processes; each "
            "drives its own share: give at least one a process"
        )


def _stage(config: Config, tokenizer: Any) -> Stage | None:
    """Where episodes are played, if they are."""
    rollout = config.rollout
    if rollout.env is None:
        return None
    return Stage(
        Environment(rollout.env, rollout.env_timeout_s),
        Continuation(tokenizer, chat_template(config.data)),
        max_turns=rollout.max_turns,
        max_turn_tokens=rollout.max_turn_tokens,
    )


def _engine(
    config: Config, model: Model, folder: str, prompts: Sequence[Prompt], peers: Peers
) -> RolloutEngine:
    rollout = config.rollout
    if rollout.engine == "trainside":
        return TrainsideEngine(
            model, batch_size=rollout.batch_size, gather_weights=rollout.gather_weights
        )
    # An HTTP client is loaded by the runs that talk to servers.
    from jaxrl.rollout.sglang.engine import SGLangEngine

    # Some prompt of at least two tokens: the first one's logarithm has nothing to be compared with.
    probe = max((prompt.ids for prompt in prompts[:64]), key=len)
    own = "" if peers.count == 1 else f"process-{peers.index}"
    return SGLangEngine(
        model,
        replace(rollout, urls=list(share_of(rollout.urls, peers))),
        source=folder,
        run_dir=str(Path(config.run_dir) / own),
        probe_ids=probe if len(probe) > 1 else probe * 2,
        max_tokens=config.max_tokens,
    )


def _make_model_folder(config: Config) -> None:
    folder = Path(config.model.path)
    if config.model.make is not None and not (folder / "config.json").exists():
        try:
            make = load_function(config.model.make)
        except ImportError as error:
            raise ConfigError(
                f"model.make={config.model.make!r} cannot be used: {error}"
            ) from error
        make(str(folder), config.seed)


def _check_critic(critic: CriticConfig, policy: ModelConfig) -> None:
    assert critic.path is not None
    trunk, kind = load_trunk_config(critic.path)
    if critic.keep_head and kind == "ForCausalLM":
        raise ConfigError(
            f"critic.keep_head=true, but critic.path={critic.path} is a language model without a "
            "score of its own; set it to false, or give a classifier with one label"
        )
    if replace(trunk, tie_word_embeddings=policy.tie_word_embeddings) != policy:
        raise ConfigError(
            f"critic.path={critic.path}: the critic's trunk must have the policy's architecture; "
            f"got {trunk}, expected {policy}"
        )


def _sampling(config: Config, folder: str, tokenizer: Any) -> Sampling:
    rollout = config.rollout
    stop = rollout.stop_token_ids
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        stop_token_ids=_stop_ids(folder, tokenizer) if stop is None else tuple(stop),
    )


def _stop_ids(folder: str, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids: the generation config's, else the config's, else the tokenizer's."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        ids = (
            json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if path.exists()
            else None
        )
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    if tokenizer.eos_token_id is not None:
        return (tokenizer.eos_token_id,)
    raise ConfigError(
        "rollout.stop_token_ids is null and the model folder names no end-of-sequence token; "
        "give the ids"
    )

"""The loop: start or resume, iterate, evaluate, record, save, and leave a whole checkpoint behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from jaxrl.checkpoint.hf_export import export_hf
from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.config import Config
from jaxrl.config_io import config_to_dict, save_config
from jaxrl.errors import CheckpointError, TrainingError
from jaxrl.evaluation import evaluate, sample_rows
from jaxrl.flops import iteration_flops
from jaxrl.iteration import iterate, rollout_seed
from jaxrl.metrics import MetricsLog
from jaxrl.progress import Progress
from jaxrl.report import write_report
from jaxrl.setup import Run
from jaxrl.state import abstract_state, fresh_state, reference_params
from jaxrl.stopping import StopRequested, StopSignal
from jaxrl.types import TrainState

__all__ = ["open_store", "train"]


def open_store(config: Config) -> CheckpointStore:
    """The run's checkpoints, with `resume` honoured.

    Raises:
        CheckpointError: resume=never and there is one, or resume=must and there is none.
    """
    folder = Path(config.run_dir) / "checkpoints"
    store = CheckpointStore(folder, keep=config.checkpoint.keep)
    latest = store.latest()
    if config.resume == "never" and latest is not None:
        raise CheckpointError(
            f"resume=never, but {folder} holds a checkpoint of iteration {latest}; "
            "set resume=auto to go on from it, or give another run_dir"
        )
    if config.resume == "must" and latest is None:
        raise CheckpointError(
            f"resume=must, but {folder} holds no whole checkpoint; set resume=auto to start anew"
        )
    return store


def train(run: Run, store: CheckpointStore) -> TrainState:
    """Run the configured iterations; returns the last state.

    The state on disk is always that of a finished iteration, together with the prompt cursor at that
    point. A stop request saves the last finished iteration and returns.
    """
    config = run.config
    state = _start(run, store)
    reference = reference_params(config, run.model, run.mesh) if config.needs_reference else None
    first = int(state.iteration)
    log = MetricsLog(Path(config.run_dir), tensorboard=config.log.tensorboard, resume_step=first)
    progress = Progress(config.iterations, enabled=config.log.progress, start=first)
    finished = _host_state(run)
    with StopSignal() as stop, log, progress:
        try:
            run.engine.publish(state.policy_params, first)
            if first == 0:
                log.write(0, _evaluate(run, log, progress, 0))
            while int(state.iteration) < config.iterations:
                stop.check()
                state, metrics, trajectories, scores = iterate(run, state, reference, progress, stop)
                done = int(state.iteration)
                finished = _host_state(run)
                if _is_due(config.eval.every, done, config.iterations):
                    metrics |= _evaluate(run, log, progress, done)
                metrics |= progress.finish(done, metrics, **_work(run, trajectories, metrics))
                metrics["compilations"] = float(run.steps.compilations + run.engine.compilations)
                log.write(done, metrics)
                log.samples(done, sample_rows(run, trajectories, scores, config.log.samples))
                _check_health(config, state)
                if _is_due(config.checkpoint.every, done, config.iterations):
                    with progress.phase("checkpoint"):
                        store.save(done, state, finished)
        except StopRequested as request:
            progress.note(f"{request}: saving iteration {int(state.iteration)} and stopping")
            if store.latest() != int(state.iteration):
                store.save(int(state.iteration), state, finished)
        finally:
            store.wait()
    return state

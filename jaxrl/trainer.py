"""The loop: start or resume, iterate, evaluate, record, and leave a whole checkpoint behind."""

from __future__ import annotations

import io

from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.config import Config
from jaxrl.errors import CheckpointError, JaxrlError, RewardError, RolloutError, TrainingError
from jaxrl.evaluation import evaluate, sample_rows
from jaxrl.flops import iteration_flops
from jaxrl.iteration import iterate
from jaxrl.metrics import MetricsLog
from jaxrl.progress import Progress
from jaxrl.rollouts import Batch, is_due, rollout_seed
from jaxrl.saving import Saver
from jaxrl.setup import Run
from jaxrl.state import abstract_state, fresh_state, reference_params
from jaxrl.stopping import StopRequested, StopSignal
from jaxrl.types import TrainState
from jaxrl.unrecorded import Unrecorded

__all__ = ["check_resume", "start", "train"]

_EVAL_STREAM = 1 << 32
"""Keeps the seeds of evaluations apart from those of rollouts."""


def check_resume(config: Config, store: CheckpointStore) -> int | None:
    """Iteration to go on from, or None to start anew; `resume` is honoured.

    Raises:
        CheckpointError: resume=never and there is a checkpoint, or resume=must and there is none.
    """
    latest = store.latest(contents=True)
    if config.resume == "never" and latest is not None:
        raise CheckpointError(
            f"resume=never, but {store.folder} holds a checkpoint of iteration {latest}; "
            "set resume=auto to go on from it, or give another run_dir"
        )
    if latest is None and (config.resume == "must" or store.damaged()):
        found = "".join(f"; {path.name}: {why}" for path, why in store.damaged().items())
        raise CheckpointError(
            f"resume={config.resume}, but {store.folder} holds no whole checkpoint{found}; "
            "remove what is left there to start anew, or give another run_dir"
        )
    return latest


def start(run: Run, store: CheckpointStore) -> TrainState:
    """The state of the newest checkpoint, with the prompt cursor put back, or a fresh one."""
    latest = run.peers.exchange("newest checkpoint", check_resume(run.config, store))[0]
    if latest is None:
        return fresh_state(run.config, run.model, run.mesh, run.optimizers)
    like = abstract_state(run.config, run.model, run.mesh, run.optimizers)
    state, host = store.restore(latest, like)
    run.cursor.restore(host["cursor"])
    return state


def train(run: Run, store: CheckpointStore, state: TrainState) -> TrainState:
    """Run the iterations that are left; returns the last state.

    What is saved is always the state of a finished iteration with the prompt cursor of that moment.
    A stop request saves the last finished iteration and returns; so does an error of a server or of
    a reward function, which is then raised.
    """
    config, first = run.config, int(state.iteration)
    reference = reference_params(config, run.model, run.mesh) if config.needs_reference else None
    log, progress = _record(run, first)
    saver = Saver(run, store, progress, first)
    cursor, metrics = run.cursor.state(), dict[str, float]()
    with StopSignal(run.peers) as stop, progress:
        try:
            run.engine.publish(state.policy_params, first)
            if first == 0:
                metrics = _evaluate(run, log, progress, stop, 0)
                log.write(0, metrics)
                saver.check(metrics)
            progress.reset()
            while int(state.iteration) < config.iterations:
                stop.check()
                state, metrics, batch, scores = iterate(run, state, reference, progress, stop)
                cursor, done = batch.cursor, int(state.iteration)
                if not metrics["policy/tokens"]:
                    progress.note(f"iteration {done}: no completion could be trained on")
                try:
                    metrics |= _hand_over(run, state, log, progress, stop)
                except (JaxrlError, StopRequested):
                    log.write(done, metrics)  # the iteration is finished, and will be saved
                    raise
                metrics["compilations"] = float(run.steps.compilations + run.engine.compilations)
                metrics |= progress.finish(done, metrics, **_work(run, batch, metrics))
                log.write(done, metrics)
                log.samples(done, sample_rows(run, batch.trajectories, scores, config.log.samples))
                # After its lines: a run that is resumed from it has them.
                saver.finished(state, cursor, metrics)
                _check_health(config, state)
        except StopRequested as request:
            progress.note(f"{request}: saving iteration {int(state.iteration)}, then stopping")
            saver.last(state, cursor, metrics)
        except (RolloutError, RewardError) as error:
            if run.peers.shared(error) and saver.last(state, cursor, metrics):
                progress.note(f"iteration {int(state.iteration)} is saved; {type(error).__name__}:")
            raise
        finally:
            log.close()
            store.wait()
    return state


def _record(run: Run, first: int) -> tuple[MetricsLog, Progress]:
    """Where metrics and lines go; of several processes the first one writes and shows."""
    config = run.config
    if not run.peers.leads:
        silent = Progress(config.iterations, enabled=False, start=first, stream=io.StringIO())
        return Unrecorded(), silent
    if first:
        print(f"going on from iteration {first} of {config.iterations}", flush=True)
    log = MetricsLog(
        config.run_dir, tensorboard=config.log.tensorboard, resume_step=first if first else None
    )
    return log, Progress(config.iterations, enabled=config.log.progress, start=first)


def _hand_over(
    run: Run, state: TrainState, log: MetricsLog, progress: Progress, stop: StopSignal
) -> dict[str, float]:
    """Publish the weights of a finished iteration, and evaluate them if that is due."""
    done = int(state.iteration)
    with progress.phase("publish"):
        run.engine.publish(state.policy_params, done)
    if is_due(run.config.eval.every, done, run.config.iterations):
        return _evaluate(run, log, progress, stop, done)
    return {}


def _evaluate(
    run: Run, log: MetricsLog, progress: Progress, stop: StopSignal, done: int
) -> dict[str, float]:
    if not run.eval_prompts:
        return {}
    with stop.at_once(), progress.phase("eval"):
        metrics, rows = evaluate(run, seed=rollout_seed(run.config.seed, done + _EVAL_STREAM))
    log.samples(done, [row | {"held_out": True} for row in rows])
    return metrics


def _check_health(config: Config, state: TrainState) -> None:
    """Stop before skipped updates waste the night; nothing non-finite was ever applied."""
    skipped = int(state.skipped_in_a_row)
    if skipped >= config.algorithm.max_skipped_in_a_row:
        raise TrainingError(
            f"{skipped} updates in a row had a non-finite loss or gradient "
            f"(algorithm.max_skipped_in_a_row={config.algorithm.max_skipped_in_a_row}); parameters "
            "are those before them. Lower optim.policy.lr or look at rewards and log-probabilities"
        )


def _work(run: Run, batch: Batch, metrics: dict[str, float]) -> dict[str, float]:
    """What the iteration did, for rates."""
    flops = iteration_flops(run.config, run.model.config, batch.trajectories)
    return {
        "generated_tokens": metrics["rollout/tokens"],
        "trained_tokens": metrics["packing/trained_tokens"] * run.config.algorithm.epochs,
        "model_flops": sum(flops.values()),
    }

"""What `scripts/train.py` does: a run, a dry run, an evaluation; each gives an exit status."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.checkpoint.hf_export import export_hf, hf_tensors
from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.config import Config
from jaxrl.config_checks import check_config
from jaxrl.config_io import save_config
from jaxrl.episodes import collect
from jaxrl.errors import CheckpointError
from jaxrl.evaluation import evaluate
from jaxrl.iteration import pack_for, plan_for
from jaxrl.metrics import read_metrics
from jaxrl.processes import ALONE, Peers
from jaxrl.provenance import provenance
from jaxrl.report import write_report
from jaxrl.rollouts import rollout_seed
from jaxrl.setup import Run, build
from jaxrl.sharding import batch_sharding, row_multiple
from jaxrl.state import reference_params
from jaxrl.trainer import check_resume, start, train
from jaxrl.types import Outcomes, TrainState

__all__ = ["dry_run", "evaluate_only", "run"]


def run(config: Config, peers: Peers = ALONE) -> int:
    """Train to the last iteration, then write curves and the Hugging Face export."""
    check_config(config)
    folder = _run_folder(config)
    with closing(_store(config, peers)) as store:
        check_resume(config, store)
        store.check_writable()
        if peers.leads:
            save_config(config, folder / "config.yaml")
            _write_provenance(folder)
        with closing(build(config, peers)) as ready:
            if peers.leads:
                print(_where(ready), flush=True)
            state = train(ready, store, start(ready, store))
            _close_run(ready, store, state)
    peers.close()
    return 0 if int(state.iteration) == config.iterations else 3


def _where(ready: Run) -> str:
    """What this run computes on, and how attention is computed there."""
    mesh, packing = ready.mesh, ready.config.packing
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    ways = {
        length: ready.model.attention_for(length, branches=packing.share_prompts)
        for length in packing.row_lengths
    }
    attention = ", ".join(
        f"{way} (rows of {'/'.join(str(n) for n in ways if ways[n] == way)})"
        for way in dict.fromkeys(ways.values())
    )
    return (
        f"{mesh.size} {mesh.devices.flat[0].platform} device(s): {sizes}; "
        f"{ready.peers.count} process(es); attention {attention}"
    )


def _run_folder(config: Config) -> Path:
    folder = Path(config.run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"run_dir={config.run_dir} cannot be made ({error}); give a folder that can be written"
        ) from error
    return folder


def _write_provenance(folder: Path) -> None:
    """Versions, commit and command of this start; a resumed run adds a line of its own."""
    line = {"command": sys.argv, "devices": [str(d) for d in jax.devices()]} | provenance()
    with (folder / "provenance.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _store(config: Config, peers: Peers = ALONE) -> CheckpointStore:
    folder = Path(config.run_dir) / "checkpoints"
    return CheckpointStore(folder, keep=config.checkpoint.keep, peers=peers)


def _close_run(ready: Run, store: CheckpointStore, state: TrainState) -> None:
    """Curves, export, and the few lines a person came for."""
    config, done = ready.config, int(state.iteration)
    finished = done == config.iterations
    out = _export(ready, state) if finished and config.checkpoint.export else None
    if not ready.peers.leads:
        return
    picture = write_report(config.run_dir)
    scores = [row for row in read_metrics(config.run_dir) if "eval/score" in row]
    if scores:
        first, last = scores[0], scores[-1]
        print(
            f"held-out score  before {first['eval/score']:.3f}  after {last['eval/score']:.3f}  "
            f"({len(ready.eval_prompts)} prompts, iteration {last['step']} of {config.iterations})"
        )
    if config.checkpoint.best and (best := store.best()):
        print(f"best            {best[1].metric} {best[1].value:.4g} at iteration {best[0]}")
    print(f"curves          {picture}")
    if not finished:
        print(f"stopped at iteration {done}; the same command goes on from there")
    elif out:
        print(f"export          {out}")


def _export(ready: Run, state: TrainState) -> Path:
    """The policy as a Hugging Face folder; every process has a part in fetching each tensor."""
    out, params = Path(ready.config.run_dir) / "export", state.policy_params
    if ready.peers.leads:
        return export_hf(out, params, ready.model.config, source=ready.config.model.path)
    for tensor in hf_tensors(params, ready.model.config):
        deque(tensor.pieces(), maxlen=0)
    return out


def evaluate_only(config: Config, which: str | None = None) -> int:
    """Score the held-out prompts with a checkpoint.

    Args:
        config: the run.
        which: latest, best or an iteration; None: the newest, or the model as it came.
    """
    check_config(config)
    with closing(_store(config)) as store, closing(build(config)) as ready:
        if not ready.eval_prompts:
            print("data.eval is null: there is nothing to evaluate")
            return 1
        step = store.latest() if which is None else store.find(which)
        if step is None:
            params = reference_params(config, ready.model, ready.mesh)
        else:
            params, _ = store.restore_policy(step)
        ready.engine.publish(params, step or 0)
        metrics, rows = evaluate(ready, seed=rollout_seed(config.seed, 0))
    for row in rows[: config.log.samples]:
        print(f"{row['score']:6.2f}  {row['prompt']!r} -> {row['completion']!r}")
    what = "the untrained model" if step is None else f"iteration {step}"
    print(", ".join(f"{name} {value:.4g}" for name, value in metrics.items()), f"({what})")
    return 0


def dry_run(config: Config) -> int:
    """Sample and score one batch, compile every step for it, train nothing, write nothing."""
    check_config(config)
    with closing(_store(config)) as store, closing(build(config)) as ready:
        check_resume(config, store)
        state = start(ready, store)
        ready.engine.publish(state.policy_params, 0)
        for name, (seconds, detail) in _rehearse(ready, state).items():
            print(f"{name:10s} {seconds:7.1f} s  {detail}")
    print("dry run: everything was checked and compiled, nothing was trained")
    return 0


def _rehearse(ready: Run, state: TrainState) -> dict[str, tuple[float, str]]:
    """Seconds and a word on each stage; updates are compiled and not executed."""
    config, found = ready.config, {}
    clock = time.perf_counter()

    def lap(name: str, detail: str) -> None:
        nonlocal clock
        found[name] = (time.perf_counter() - clock, detail)
        clock = time.perf_counter()

    prompts = ready.cursor.take(config.rollout.prompts)
    trajectories = collect(
        ready.engine,
        prompts,
        ready.stage,
        samples=config.rollout.samples,
        sampling=ready.sampling,
        seed=0,
    )
    lap("rollout", f"{len(trajectories)} completions, {ready.engine.compilations} programs")
    scores = ready.score(trajectories)
    lap("reward", f"mean {scores.values.mean():.3f}")
    layout = plan_for(config, trajectories, row_multiple(ready.mesh))
    packed = jax.device_put(pack_for(config, trajectories, layout), batch_sharding(ready.mesh))
    lap("pack", f"{layout.micros} x {layout.rows} x {layout.row_length} tokens")
    reference = state.policy_params if config.needs_reference else None
    anchors = ready.steps.score(state.policy_params, state.value_params, reference, packed)
    lap(
        "score",
        _memory(ready.steps.score, state.policy_params, state.value_params, reference, packed),
    )
    outcomes = Outcomes(
        scores=scores.values,
        groups=np.arange(len(trajectories), dtype=np.int32) // config.rollout.samples,
        truncated=np.array([t.truncated for t in trajectories]),
        positive=scores.valid,
    )
    batch, _ = ready.steps.advantage(packed, anchors, outcomes, state.kl_coef)
    lap("advantage", "")
    lap("update", _memory(ready.steps.update, state, jax.tree.map(lambda x: x[0], batch)))
    return found


def _memory(step: Any, *arguments: Any) -> str:
    """Temporaries of a step, as the compiler plans them."""
    analysis = step.lower(*arguments).compile().memory_analysis()
    return f"{analysis.temp_size_in_bytes / 2**20:.0f} MiB of temporaries"

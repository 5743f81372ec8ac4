"""What a run records: a line a step in metrics.jsonl, completions in samples.jsonl, and trackers.

The two files are the record. TensorBoard and trackers of one's own are told the same (`trackers`).
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.trackers import GuardedTracker, TensorBoard, Tracker

__all__ = [
    "METRICS",
    "WALL_CLOCK",
    "MetricsLog",
    "average",
    "average_rows",
    "read_metrics",
    "read_samples",
]

METRICS: Mapping[str, str] = {
    "reward/mean": "mean score of the rollouts, reward units",
    "reward/std": "their population deviation, reward units",
    "reward/trained_mean": "mean score after reward.* shaping and algorithm.truncated",
    "eval/score": "mean score on held-out prompts, reward units (accuracy for 0/1 rewards)",
    "eval/response_length": "mean length of held-out responses, tokens",
    "eval/turns": "mean turns of the policy in a held-out episode",
    "policy/loss": "policy loss, averaged as algorithm.aggregation says",
    "policy/ratio_mean": "mean probability ratio new / old",
    "policy/ratio_min": "smallest ratio",
    "policy/ratio_max": "largest ratio",
    "policy/clip_fraction_up": "fraction of policy tokens clipped at 1 + clip_high",
    "policy/clip_fraction_down": "fraction of policy tokens clipped at 1 - clip_low",
    "policy/approx_kl_k1": "KL(old, new), estimator k1, nats a token",
    "policy/approx_kl_k3": "KL(old, new), estimator k3, nats a token",
    "policy/nll": "negative log-likelihood of good responses, nats a token",
    "policy/entropy": "entropy of the policy, nats a token",
    "policy/grad_norm": "global norm of the policy's gradient before clipping",
    "policy/lr": "learning rate of the policy's last optimizer step",
    "value/loss": "value loss, reward units squared",
    "value/mean": "mean value, reward units",
    "value/return_mean": "mean return, reward units",
    "value/explained_variance": "1 - Var(return - value) / Var(return), with the old values",
    "value/clip_fraction": "fraction of policy tokens whose value is clipped",
    "value/grad_norm": "global norm of the critic's gradient before clipping",
    "value/lr": "learning rate of the critic's last optimizer step",
    "kl/reference": "KL(policy, reference), estimator k1, nats a token",
    "kl/loss": "KL penalty in the loss, estimator algorithm.kl_kind, nats",
    "kl/coef": "coefficient of the KL penalty, reward units a nat",
    "importance/weight_mean": "mean factor on a policy loss for sampling with another policy",
    "importance/weight_min": "smallest such factor",
    "importance/weight_max": "largest such factor",
    "importance/capped_fraction": "fraction of policy tokens whose factor is at the cap",
    "importance/rejected_fraction": "fraction of policy tokens outside the rejection bounds",
    "importance/effective_fraction": "effective sample size of the factors over the tokens",
    "rollout/logprob_diff_mean": "mean |log-probability of the trainer - of the engine|, nats",
    "rollout/logprob_diff_max": "largest such difference, nats",
    "rollout/response_length": "mean response length, tokens",
    "rollout/rounds": "dynamic sampling: rounds of sampling in the iteration",
    "rollout/flat_groups": "prompts of it whose samples all scored the same",
    "rollout/dropped_groups": "prompts that were sampled and not trained on",
    "reward/sampled_mean": "mean score of all that was sampled, dropped prompts included",
    "rollout/truncated_fraction": "fraction of responses ended by the length limit",
    "updates/skipped": "updates skipped so far for a non-finite loss or gradient",
    "first_update/ratio_mean": "mean ratio before the first optimizer step: 1",
    "first_update/logprob_diff_max": "largest |new - old log-probability| there, nats: 0",
    "first_update/clip_fraction": "fraction of policy tokens clipped there: 0",
    "time/iteration_s": "whole iteration, seconds; time/<phase>_s: a phase of it",
    "time/checkpoint_s": "seconds that the loop waited for the checkpoint of the iteration before",
    "time/scoring_s": "seconds that scoring took, within time/rollout_s or ahead of it",
    "speed/generated_tokens_per_s": "sampled tokens a second of the rollout phase",
    "speed/trained_tokens_per_s": "tokens a second of the update phase, each pass counted",
    "speed/model_flops_per_s": "floating-point operations a second that the model asks for",
    "packing/efficiency": "fraction of packed cells that hold a token",
    "compilations": "programs compiled so far",
}
"""Every metric with its unit; all of them over policy tokens only."""

WALL_CLOCK = ("time/", "speed/", "compilations")
"""Prefixes of what depends on machine and moment; all else a resumed run repeats to the bit."""

log = logging.getLogger(__name__)


class MetricsLog:
    """Writes the record of a run into its folder."""

    def __init__(
        self,
        run_dir: Path | str,
        *,
        tensorboard: bool = False,
        resume_step: int | None = None,
        trackers: Iterable[Callable[[], Tracker]] = (),
    ) -> None:
        """Open the record.

        Args:
            run_dir: the run's folder; made if it does not exist.
            tensorboard: whether to write event files to `run_dir`/tensorboard as well.
            resume_step: the step that was restored. Later lines of an earlier process are dropped,
                so that the record is that of a run never stopped; None drops them all.
            trackers: functions that start further trackers.
        """
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        keep = -1 if resume_step is None else resume_step
        for path in (self._metrics, self._samples):
            _drop_after(path, keep)
        starts = list(trackers)
        if tensorboard:
            starts.insert(0, lambda: TensorBoard(self.run_dir / "tensorboard", keep))
        self._trackers = [GuardedTracker(start) for start in starts]

    @property
    def _metrics(self) -> Path:
        return self.run_dir / "metrics.jsonl"

    @property
    def _samples(self) -> Path:
        return self.run_dir / "samples.jsonl"

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the metrics of `step`; scalars of any kind, NaN and infinities included."""
        floats = {name: float(value) for name, value in values.items()}
        line: dict[str, Any] = {
            "step": step,
            **{name: value if math.isfinite(value) else None for name, value in floats.items()},
        }
        invalid = {name: str(value) for name, value in floats.items() if not math.isfinite(value)}
        if invalid:
            line["invalid"] = invalid
        _append(self._metrics, [line])
        for tracker in self._trackers:
            tracker.write(step, floats)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record completions with whatever belongs to them (prompt, reward, finish reason)."""
        _append(self._samples, [{"step": step, **_json_safe(row)} for row in rows])

    def __enter__(self) -> MetricsLog:
        """Nothing to do: it is open."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Give the trackers a few seconds to finish."""
        for tracker in self._trackers:
            tracker.close()


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in order, NaN and infinities restored; [] if there are none."""
    rows = [row for _, row in _lines(Path(run_dir) / "metrics.jsonl")]
    for row in rows:
        row.update({name: float(text) for name, text in row.pop("invalid", {}).items()})
    return rows


def read_samples(run_dir: Path | str) -> list[dict[str, Any]]:
    """The lines of samples.jsonl in order; [] if there are none."""
    return [row for _, row in _lines(Path(run_dir) / "samples.jsonl")]


def average(values: Iterable[float]) -> tuple[float, int]:
    """Mean of the finite values, and how many were not finite.

    >>> average([1.0, float("nan"), 3.0])
    (2.0, 1)
    """
    everything = [float(value) for value in values]
    valid = [value for value in everything if math.isfinite(value)]
    mean = math.fsum(valid) / len(valid) if valid else math.nan
    return mean, len(everything) - len(valid)


def average_rows(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Averages key by key; "<key>_invalid" counts what was left out, nothing valid: no key."""
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        mean, invalid = average(row[name] for row in rows if name in row)
        if not math.isnan(mean):
            result[name] = mean
        if invalid:
            result[f"{name}_invalid"] = float(invalid)
    return result


def _json_safe(value: Any) -> Any:
    """`value` as JSON can hold it: other scalars as numbers, NaN and infinities as text."""
    if isinstance(value, Mapping):
        return {str(name): _json_safe(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(part) for part in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "tolist"):
        return _json_safe(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)


def _append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add lines, all or none; a full disk costs the lines and a warning, not the run."""
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        log.warning("%s could not be written: %s; the run goes on", path, error)
        if path.exists():
            os.truncate(path, before)


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each whole line with its content; what a killed process left half-written is left out.

    Only a line feed ends a line: completions hold other characters that `splitlines` would cut at.
    """
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            content = json.loads(line)
        except ValueError:
            continue
        yield line, content


def _drop_after(path: Path, last_step: int) -> None:
    """Drop the lines after `last_step` by writing a new file in the place of the old."""
    if not path.exists():
        return
    new = path.with_name(path.name + ".tmp")
    with new.open("wb") as file:
        for line, content in _lines(path):
            if content["step"] <= last_step:
                file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)

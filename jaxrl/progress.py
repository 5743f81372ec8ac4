"""What the terminal shows while a run goes on, and the clock behind it.

A line for each finished iteration, and on a terminal one live line below them:

    iter 12/30  reward 0.641  held-out 0.720  len 5.3  14.2s (update 7.0 rollout 6.1)  4m15s left
    iter 13/30  rollout 4s  4m15s left
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

__all__ = ["Progress", "duration"]

# (metric, label, format); the first of several entries with one label that is there is shown.
SHOWN = (
    ("reward/mean", "reward", "{:.3f}"),
    ("eval/score", "held-out", "{:.3f}"),
    ("kl/reference", "KL ref", "{:.4f}"),
    ("policy/approx_kl_k3", "KL step", "{:.4f}"),
    ("rollout/response_length", "len", "{:.1f}"),
)
RECENT = 5
"""Iterations whose median says how long the next ones take; the first one compiles."""
LONGEST_PHASES = 2


class Progress:
    """Times the phases of each iteration and shows where the run stands.

    Use as a context manager. Not enabled, it times and shows notes only.
    """

    def __init__(
        self,
        total: int,
        *,
        enabled: bool = True,
        start: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Show a run of `total` iterations of which `start` were finished earlier.

        Args:
            total: iterations of the whole run.
            enabled: whether to show iterations.
            start: the last finished iteration.
            stream: where to write; standard output by default.
            clock: gives seconds.
        """
        self.total = total
        self.enabled = enabled
        self.finished = start
        self._stream = stream or sys.stdout
        self._clock = clock
        self._since = clock()
        self._seconds: dict[str, float] = {}
        self._phases: list[tuple[str, float]] = []
        self._done = [0, 0]
        self._recent: deque[float] = deque(maxlen=RECENT)
        console = Console(file=self._stream, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        if enabled and console.is_terminal:
            self._live = Live(
                get_renderable=self._live_line,
                console=console,
                refresh_per_second=2,
                transient=True,
            )

    def __enter__(self) -> Progress:
        """Start the live line."""
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Take the live line away."""
        if self._live:
            self._live.stop()

    @contextmanager
    def phase(self, name: str, *, total: int = 0) -> Iterator[Callable[[int], None]]:
        """Time what happens inside as `name`; the same name again adds up.

        Yields:
            A function to be told how many more of `total` things are done, from any thread.
        """
        begin = self._clock()
        self._phases.append((name, begin))
        self._done = [0, total]

        def count(more: int) -> None:
            self._done[0] += more

        try:
            yield count
        finally:
            self._phases.pop()
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - begin

    def reset(self) -> None:
        """Forget what was timed since the last iteration: it belongs to none."""
        self._seconds, self._since = {}, self._clock()

    def finish(
        self,
        iteration: int,
        metrics: Mapping[str, float],
        *,
        generated_tokens: float = 0.0,
        trained_tokens: float = 0.0,
        model_flops: float = 0.0,
    ) -> dict[str, float]:
        """End an iteration: show its line, and return its times and speeds as metrics.

        An iteration reaches from the end of the one before, so what follows this call counts to the
        next.

        Args:
            iteration: how many are finished now.
            metrics: its metrics; those that are there are shown.
            generated_tokens: tokens sampled in phase "rollout".
            trained_tokens: tokens that went through phase "update", each pass counted.
            model_flops: floating-point operations the model asked for in the whole iteration.
        """
        elapsed = self._clock() - self._since
        seconds = self._seconds
        self.reset()
        self.finished = iteration
        self._recent.append(elapsed)
        timed = {f"time/{name}_s": value for name, value in seconds.items()}
        timed["time/iteration_s"] = elapsed
        work = (
            ("generated_tokens", generated_tokens, seconds.get("rollout", 0.0)),
            ("trained_tokens", trained_tokens, seconds.get("update", 0.0)),
            ("model_flops", model_flops, elapsed),
        )
        for name, amount, spent in work:
            if amount > 0 and spent > 0:
                timed[f"speed/{name}_per_s"] = amount / spent
        if self.enabled:
            self._print(self._line(metrics, seconds, elapsed, timed))
        return timed

    def note(self, text: str) -> None:
        """Show a line of its own, whether enabled or not."""
        self._print(text)

    def seconds_left(self) -> float | None:
        """Estimated seconds until the last iteration; None before the first is finished."""
        if not self._recent:
            return None
        return statistics.median(self._recent) * (self.total - self.finished)

    def _line(
        self,
        metrics: Mapping[str, float],
        seconds: Mapping[str, float],
        elapsed: float,
        timed: Mapping[str, float],
    ) -> str:
        parts = [self._count(self.finished)]
        parts += [
            f"{label} {text.format(metrics[name])}"
            for name, label, text in SHOWN
            if name in metrics
        ]
        longest = sorted(seconds.items(), key=lambda item: -item[1])[:LONGEST_PHASES]
        inside = " ".join(f"{name} {value:.1f}" for name, value in longest)
        parts.append(f"{elapsed:.1f}s ({inside})" if inside else f"{elapsed:.1f}s")
        rate = timed.get("speed/generated_tokens_per_s")
        if rate:
            parts.append(f"{_rounded(rate)} tok/s")
        return "  ".join(parts + self._left())

    def _live_line(self) -> Text:
        parts = [self._count(min(self.finished + 1, self.total))]
        phases = list(self._phases)  # the refreshing thread reads what the main thread changes
        if phases:
            name, begin = phases[-1]
            done, total = self._done
            of = f"{done}/{total} " if total else ""
            parts.append(f"{name} {of}{duration(self._clock() - begin)}")
        return Text("  ".join(parts + self._left()), no_wrap=True, overflow="ellipsis")

    def _count(self, iteration: int) -> str:
        return f"iter {iteration:>{len(str(self.total))}}/{self.total}"

    def _left(self) -> list[str]:
        left = self.seconds_left()
        return [f"{duration(left)} left"] if left else []

    def _print(self, line: str) -> None:
        if self._live and self._live.is_started:
            self._live.console.print(Text(line))
        else:
            print(line, file=self._stream, flush=True)


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    >>> [duration(s) for s in (4.4, 185, 7620, 273600)]
    ['4s', '3m05s', '2h07m', '3d04h']
    """
    whole = round(seconds)
    for size, unit, part, below in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part:02d}{below}"
    return f"{whole}s"


def _rounded(value: float) -> str:
    """Three figures, thousands as k and millions as M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"

"""An environment that answers wrongly, slowly or never, and what is checked before it is asked."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from playing import (
    EOS,
    SCRIPT,
    Scripted,
    chat_prompt,
    encode,
    play,
    runs,
    stage_of,
)

from jaxrl.environment import Environment
from jaxrl.errors import RolloutError
from jaxrl.stopping import StopRequested, StopSignal


@pytest.fixture
def environment(request: pytest.FixtureRequest) -> Iterator[Environment]:
    """`playing:counts`, or the one a test asks for."""
    with closing(Environment(f"playing:{getattr(request, 'param', 'counts')}", 5.0)) as made:
        yield made


@pytest.mark.parametrize("environment", ["goes_on"], indirect=True)
def test_what_the_environment_does_to_its_messages_changes_nothing(environment: Environment):
    """A string is a user's message."""
    prompt = chat_prompt(0)
    engine = Scripted({(0, 0): [(30, EOS), (31, EOS), (32, EOS)]})
    (got,) = play(engine, [prompt], stage_of(environment, max_turns=3))
    assert runs(got, own=False) == [encode("\n<bos>user\nmore<eos>\n<bos>assistant\n")] * 2
    assert got.prompt.messages == ({"role": "user", "content": "3 plus 4"},)


@pytest.mark.parametrize("environment", ["gives"], indirect=True)
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("None", r"it returned None"),
        ("('more', 0.0)", r"it returned \('more', 0.0\)"),
        ("['more', 0.0, False]", r"it returned \["),
        ("('more', None, False)", "the reward is None, not a finite number"),
        ("('more', float('nan'), True)", "the reward is nan"),
        ("('more', 1e39, True)", "the reward is 1e"),
        ("('more', '1', False)", "the reward is '1'"),
        ("('more', 0.0, 'no')", "over is 'no', not a bool"),
        ("(None, 0.0, False)", "no message, though the episode is not over"),
        ("(5, 0.0, False)", "the message is 5, neither a dict nor a string"),
        ("({'role': 'tool'}, 0.0, False)", "role and content must be strings"),
        ("({'role': 'tool', 'content': 5}, 0.0, False)", "role and content must be strings"),
        ("({'role': 'assistant', 'content': ''}, 0.0, False)", "the role assistant"),
        ("1 // 0", r"raised an exception:\n(?s:.*)in gives(?s:.*)ZeroDivisionError"),
    ],
)
def test_an_unusable_answer_names_row_and_turn(environment: Environment, answer: str, said: str):
    prompts = [chat_prompt(3, answer="('', 0.0, True)"), chat_prompt(44, answer=answer)]
    engine = Scripted({(row, 0): [(30, EOS)] * 2 for row in (3, 44)})
    where = "prompt row 44, sample 0, turn 2: rollout.env=playing:gives "
    with pytest.raises(RolloutError, match=where + f"(must return .*)?{said}"):
        play(engine, prompts, stage_of(environment))


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_call_that_hangs_is_ended(concurrent: bool):
    engine = Scripted({(row, 0): [(30, EOS)] * 9 for row in range(3)}, concurrent=concurrent)
    prompts = [chat_prompt(row, who=row, turns=9) for row in range(3)]
    with closing(Environment("playing:slow_for_row_0", 0.2)) as environment:
        begun = time.monotonic()
        with pytest.raises(RolloutError, match=r"row 0, sample 0, turn 1: .* longer than 0.2 s"):
            play(engine, prompts, stage_of(environment))
        assert time.monotonic() - begun < 1.2


def test_an_error_ends_the_other_episodes_at_their_next_turn():
    """Row 0 takes too long; the others would go on for 400 turns of the environment."""
    script = {(row, 0): [(30, EOS)] * 400 for row in range(2)}
    engine = Scripted(script, concurrent=True)
    prompts = [chat_prompt(row, who=row, turns=400) for row in range(2)]
    sampling = replace(SCRIPT, max_new_tokens=10**6)
    with closing(Environment("playing:slow_for_row_0", 0.2)) as environment:
        stage = stage_of(environment, max_turns=400)
        with pytest.raises(RolloutError, match="row 0, sample 0, turn 1"):
            play(engine, prompts, stage, sampling=sampling)
    assert engine.turns[1, 0] < 400


def test_a_call_that_blocks_all_others_is_found():
    """No time limit of asyncio would ever be looked at."""
    with closing(Environment("playing:blocks", 0.2)) as environment:
        with pytest.raises(RolloutError, match="blocked the event loop .* row 4, sample 0, turn 1"):
            play(Scripted({(4, 0): [(30, EOS)]}), [chat_prompt(4)], stage_of(environment))


@pytest.mark.parametrize("environment", ["meets"], indirect=True)
@pytest.mark.parametrize("concurrent", [False, True])
def test_calls_of_a_round_run_side_by_side(environment: Environment, concurrent: bool):
    """Each of the three waits for the other two."""
    engine = Scripted({(0, sample): [(30, EOS)] for sample in range(3)}, concurrent=concurrent)
    assert len(play(engine, [chat_prompt(0)], stage_of(environment), samples=3)) == 3


def test_with_servers_a_slow_episode_holds_up_no_other():
    engine = Scripted({(row, 0): [(30, EOS)] * 3 for row in range(3)}, concurrent=True)
    prompts = [chat_prompt(row, who=row, turns=3) for row in range(3)]
    ended: list[int] = []
    with closing(Environment("playing:slow_for_row_0", 5.0)) as environment:
        got = play(
            engine,
            prompts,
            stage_of(environment),
            on_done=lambda done: ended.extend(t.prompt.row for t in done),
        )
    assert [t.prompt.row for t in got] == [0, 1, 2]
    assert ended[-1] == 0 and sorted(ended) == [0, 1, 2]
    # The others had their last turn before row 0's environment had answered its first.
    last = {t.prompt.row: t.rewards[-1] for t in got}
    assert max(last[1], last[2]) < got[0].rewards[1] + 1e-3


def test_the_name_is_checked_at_the_start():
    with pytest.raises(ValueError, match="rollout.env='playing:nothing' cannot be used"):
        Environment("playing:nothing", 1.0)
    with pytest.raises(ValueError, match="'playing:not_async' must be an async function"):
        Environment("playing:not_async", 1.0)


def test_columns_are_checked_at_the_start():
    with closing(Environment("playing:gives", 1.0)) as environment:
        environment.check([chat_prompt(0, answer="1", other=2)])
        with pytest.raises(ValueError, match="row 8: .* columns other: missing .*'answer'"):
            environment.check([chat_prompt(0, answer="1"), chat_prompt(8, other=2)])
        with pytest.raises(ValueError, match="row 8 has a column 'text'"):
            environment.check([chat_prompt(8, answer="1", text="")])


@pytest.mark.parametrize("concurrent", [False, True])
def test_ck06_a_signal_does_not_wait_for_the_environment(concurrent: bool):
    """Row 0's environment takes a second a turn, for nine turns."""
    engine = Scripted({(0, 0): [(30, EOS)] * 9}, concurrent=concurrent)
    with closing(Environment("playing:slow_for_row_0", 5.0)) as environment, StopSignal() as stop:
        ask = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
        begun = time.monotonic()
        ask.start()
        with pytest.raises(StopRequested, match="SIGTERM"), stop.at_once():
            play(engine, [chat_prompt(0, who=0, turns=9)], stage_of(environment))
        assert time.monotonic() - begun < 0.9
    assert engine.turns[0, 0] == 1

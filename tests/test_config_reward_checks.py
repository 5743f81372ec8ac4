"""Every rule of `reward` and `critic` refuses what it should, and lets its neighbours through."""

from __future__ import annotations

import pytest

from jaxrl.config_checks import check_config
from jaxrl.config_io import load_config
from jaxrl.errors import ConfigError

WORKING = ["model.path=m", "data.train.path=x.jsonl", "reward.functions=[{fn: m:f}]"]


def check(*overrides: str) -> None:
    check_config(load_config([], [*WORKING, *overrides]))


def model(**entries: object) -> str:
    given = {"path": "rm"} | entries
    return f"reward.models=[{{{', '.join(f'{k}: {v}' for k, v in given.items())}}}]"


def server(**entries: object) -> str:
    given = {"url": "http://h:1"} | entries
    given["url"] = f"'{given['url']}'"
    return f"reward.servers=[{{{', '.join(f'{k}: {v}' for k, v in given.items())}}}]"


BAD = [
    # who rewards
    (
        ["reward.functions=[]"],
        "reward.functions is empty, .*reward.models and reward.servers; .*rollout.env",
    ),
    (["reward.functions=[{fn: f}]"], r"reward.functions\[0\].fn='f' must read module:function"),
    (
        ["reward.functions=[{fn: m:f}, {fn: m:f}]"],
        r"reward.functions\[1\].fn='m:f' is listed twice",
    ),
    # models
    ([model(path='""')], r"reward.models\[0\].path is not set"),
    ([model(weight=".inf")], r"reward.models\[0\].weight=inf must be finite"),
    ([model(max_tokens=0)], r"reward.models\[0\].max_tokens=0 must be at least 1"),
    (
        [model(max_tokens=100, batch_tokens=99)],
        r"reward.models\[0\].batch_tokens=99 must hold a text of max_tokens=100",
    ),
    (
        ["reward.models=[{path: rm}, {path: rm, weight: 2}]"],
        r"models\[1\].path='rm' is listed twice",
    ),
    # servers
    *(
        ([server(url=url)], r"reward.servers\[0\].url='.*' must read http://host:port/path")
        for url in (
            "",
            "localhost",
            "localhost:80",
            "ftp://h:1",
            "http://",
            "http://:80",
            "http://h:0",
            "http://h:99999",
            "http://h:x",
            "http://h/#x",
            "http://a b",
        )
    ),
    ([server(weight=".nan")], r"reward.servers\[0\].weight=nan must be finite"),
    ([server(batch_size=0)], r"reward.servers\[0\].batch_size=0 must be at least 1"),
    ([server(concurrency=0)], r"reward.servers\[0\].concurrency=0 must be at least 1"),
    ([server(attempts=0)], r"reward.servers\[0\].attempts=0 must be at least 1"),
    ([server(timeout_s=0)], r"reward.servers\[0\].timeout_s=0.0 must lie in \(0, inf\)"),
    ([server(timeout_s=".inf")], r"reward.servers\[0\].timeout_s=inf must lie"),
    (
        ["reward.servers=[{url: 'http://h:1'}, {url: 'http://h:1'}]"],
        r"servers\[1\].url='http://h:1' is listed twice",
    ),
    # shaping
    (["reward.scale=.inf"], "reward.scale=inf must lie in"),
    (["reward.shift=.nan"], "reward.shift=nan must lie in"),
    (["reward.clip=0"], r"reward.clip=0.0 must lie in \(0, inf\)"),
    # critic
    (["critic.keep_head=true"], "critic.keep_head=true needs a reward model .* critic.kind=model"),
    (["critic.kind=model", "critic.keep_head=true"], "critic.keep_head=true needs .* critic.path"),
    (["critic.path=rm"], "critic.path='rm' is read for critic.kind=model only"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD, ids=lambda value: str(value)[:60])
def test_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check(*overrides)
    assert len(str(caught.value).splitlines()) == 1


GOOD = [
    ["reward.functions=[]", model()],
    ["reward.functions=[]", server()],
    ["reward.functions=[]", "rollout.env=m:f"],
    [model(weight=-1.5, max_tokens=1, batch_tokens=1, dtype="bfloat16", chat="false")],
    ["reward.models=[{path: rm}, {path: rm, chat: false}, {path: other}]"],
    [server(url="https://host.example/v1/score?model=a", attempts=1, batch_size=1, concurrency=1)],
    [server(url="http://[::1]:8000/", weight=-2, timeout_s=0.1)],
    ["reward.servers=[{url: 'http://h:1'}, {url: 'http://h:2'}]"],
    ["reward.normalise=mean_std", "reward.scale=-1", "reward.shift=-3", "reward.clip=0.1"],
    ["critic.kind=model", "critic.path=rm", "critic.keep_head=true"],
]


@pytest.mark.parametrize("overrides", GOOD, ids=lambda value: str(value)[:60])
def test_allowed(overrides: list[str]) -> None:
    check(*overrides)

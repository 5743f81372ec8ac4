"""Every rule between settings refuses what it should, and lets its neighbours through."""

from __future__ import annotations

import pytest

from jaxrl.config import Config
from jaxrl.config_checks import check_config
from jaxrl.config_io import load_config
from jaxrl.config_ranges import _RANGES
from jaxrl.config_schema import settings
from jaxrl.errors import ConfigError

WORKING = ["model.path=m", "data.train.path=x.jsonl", "reward.functions=[{fn: m:f}]"]
SGLANG = "rollout.engine=sglang rollout.urls=[http://127.0.0.1:30000]"
GRPO = "algorithm.advantage_mode=grpo"


def check(*overrides: str) -> None:
    check_config(load_config([], [*WORKING, *overrides]))


def test_the_defaults_work_once_the_required_settings_are_given() -> None:
    check()
    with pytest.raises(ConfigError) as caught:
        check_config(Config())
    lines = str(caught.value).splitlines()
    assert [line.split(" ")[0] for line in lines] == [
        "model.path",
        "reward.functions",
        "data.train.path",
    ]


BAD = [
    # sizes that do not divide or fit
    (
        "algorithm.updates=5",
        "algorithm.updates=5 must divide the 64 .* one of 1, 2, 4, 8, 16, 32, 64",
    ),
    ("algorithm.updates=128", "algorithm.updates=128 must divide"),
    ("rollout.prompts=3 rollout.samples=2 algorithm.updates=4", "the 6 completions .* 1, 2, 3, 6"),
    ("rollout.max_new_tokens=3585", "no row for a trajectory of .* = 4097 .* at least 4097"),
    ("packing.micro_batch_tokens=1023", "micro_batch_tokens=1023 must hold a row of 1024 tokens"),
    ("packing.micro_batch_tokens=4095 mesh.data=2 mesh.fsdp=2", "4 shards .* at least 4096"),
    ("packing.row_lengths=[]", "packing.row_lengths"),
    ("packing.row_lengths=[512, 256, 1024]", "positive and rise"),
    ("packing.row_lengths=[0, 1024]", "positive and rise"),
    ("packing.row_lengths=[1024, 1024]", "positive and rise"),
    # groups
    (f"{GRPO} rollout.samples=1", "rollout.samples=1 .* needs at least 2"),
    (f"{GRPO} algorithm.group_scale=loo rollout.samples=1", "rollout.samples=1"),
    # critic
    ("critic.path=m", "critic.path='m' is read for critic.kind=model only"),
    ("critic.kind=model critic.trunk_gradient=false", "critic.trunk_gradient=false"),
    (f"{GRPO} critic.warmup_iterations=1", "critic.warmup_iterations=1 needs a critic"),
    (
        "critic.warmup_iterations=100",
        "critic.warmup_iterations=100 must be less than iterations=100",
    ),
    # penalty
    ("algorithm.kl_target=6", "algorithm.kl_target=6.0 .*kl_in=off; set kl_in=reward"),
    ("algorithm.kl_in=loss algorithm.kl_kind=k2 algorithm.kl_target=6", "kl_in=loss; set kl_in"),
    (
        "algorithm.kl_in=reward algorithm.kl_target=6 algorithm.kl_coef=0",
        "algorithm.kl_coef=0 stays",
    ),
    ("algorithm.kl_in=loss", "algorithm.kl_kind=k1 has a gradient of zero .* kl_kind to k2"),
    (
        "algorithm.kl_weighted=true",
        "kl_weighted=True is read with kl_in=loss only; set it to false",
    ),
    # advantages and endings
    (f"{GRPO} algorithm.lam_alpha=0.05", "lam_alpha=0.05 is read with advantage_mode=gae .* null"),
    (f"{GRPO} algorithm.value_lam=1", "value_lam=1.0 is read with advantage_mode=gae only"),
    (f"{GRPO} algorithm.gae_over=response", "gae_over=response is read .* set it to policy_tokens"),
    ("algorithm.group_scale=loo", "group_scale=loo is read with advantage_mode=grpo .* to std"),
    (
        "algorithm.advantage_mode=returns critic.warmup_iterations=1",
        "warmup_iterations=1 needs a critic, which algorithm.advantage_mode=returns has not",
    ),
    ("algorithm.whiten=group rollout.samples=1", "whiten=group with rollout.samples=1"),
    (f"{GRPO} algorithm.truncated=bootstrap", "truncated=bootstrap .* advantage_mode=grpo has no"),
    ("algorithm.truncated=soft", r"overlong_buffer=0 must lie in \[1, 128\]"),
    ("algorithm.truncated=soft algorithm.overlong_buffer=129", "overlong_buffer=129 must lie in"),
    ("algorithm.overlong_buffer=9", "overlong_buffer=9 is read with truncated=soft only"),
    ("algorithm.overlong_penalty=2", "overlong_penalty=2.0 is read with truncated=soft only"),
    (
        "algorithm.truncated=mask algorithm.missing_eos_penalty=1",
        "missing_eos_penalty=1.0 is for truncated responses",
    ),
    ("algorithm.nll_above=1", "nll_above=1.0 is read with nll_coef above 0 only"),
    ("algorithm.nll_coef=1 algorithm.nll_above=.nan", "algorithm.nll_above=nan must lie in"),
    # rejection
    ("algorithm.importance_cap=3", "importance_cap=3.0 is read with importance token or sequence"),
    ("algorithm.rejection_low=0.1", "rejection_low=0.1 is read with rejection other than off"),
    ("algorithm.rejection_high=9", "rejection_high=9.0 is read with rejection other than off"),
    ("algorithm.rejection=token algorithm.rejection_low=2", "rejection_low=2.0 must be below"),
    (
        "algorithm.rejection=token algorithm.rejection_low=1.1",
        "rejection_low=1.1 .* put 1 between them",
    ),
    # sampling
    ("rollout.temperature=0", "rollout.temperature=0.0 .* greedy"),
    ("rollout.top_k=5", "rollout.top_k=5 samples from another distribution .* rollout.top_k=0"),
    ("rollout.top_p=0.9", "rollout.top_p=0.9 .* algorithm.importance"),
    ("rollout.min_p=0.1", "rollout.min_p=0.1"),
    ("rollout.stop_token_ids=[3, -1]", "rollout.stop_token_ids has -1"),
    # servers
    ("rollout.engine=sglang", "rollout.urls is empty; .* e.g. rollout.urls="),
    (f"{SGLANG} rollout.urls=[localhost]", "'localhost' must read http://host:port"),
    (f"{SGLANG} rollout.router=here", "'here' must read http://host:port"),
    (f"{SGLANG} rollout.urls=[http://a:1,http://a:1]", "names a server twice"),
    (f"{SGLANG} rollout.top_p=0.9 algorithm.importance=token", "know nothing of filters"),
    (f"{SGLANG} rollout.publish=tensor rollout.publish_dir=x", "is read for rollout.publish=disk"),
    (
        f"{SGLANG} rollout.max_staleness=1 algorithm.importance=token rollout.colocated=true",
        "rollout.max_staleness=1 generates while the trainer works",
    ),
    (f"{SGLANG} rollout.max_staleness=2", "max_staleness=2 trains on samples of older weights"),
    (
        "rollout.urls=[http://a:1]",
        "rollout.urls=.* is read for rollout.engine=sglang only; .* \\[\\]",
    ),
    ("rollout.launch=x", "rollout.launch='x' is read for .*; set it to null"),
    ("rollout.max_staleness=1", "rollout.max_staleness=1 is read for rollout.engine=sglang only"),
    (
        "algorithm.old_logprobs=rollout algorithm.importance=token",
        "algorithm.importance=token weighs .* set importance=off",
    ),
    # schedules
    ("optim.policy.warmup_steps=101", "optim.policy.warmup_steps=101 .* the 100 optimizer steps"),
    ("optim.value.warmup_steps=7 iterations=3 algorithm.epochs=2", "the 6 optimizer steps"),
    # mesh
    ("mesh.data=-1", "mesh.data=-1, mesh.fsdp=-1, mesh.tensor=1: at most one may be -1"),
    ("mesh.tensor=0", "mesh.tensor=0 must be at least 1, or -1"),
    ("mesh.data=-2", "mesh.data=-2"),
    # names and sources
    ("run_dir=''", "run_dir is empty"),
    ("model.make=module", "model.make='module' must read module:function"),
    ("reward.functions=[]", "reward.functions is empty"),
    ("reward.functions=[{fn: f}]", r"reward.functions\[0\].fn='f' must read module:function"),
    ("reward.functions=[{weight: 2}]", r"reward.functions\[0\].fn='' must read"),
    ("reward.functions=[{fn: m:f}, {fn: m:f}]", r"reward.functions\[1\].fn='m:f' is listed twice"),
    ("reward.functions[0].weight=.nan", r"reward.functions\[0\].weight=nan must be finite"),
    ("data.system=hello data.chat=false", "data.system needs data.chat=true"),
    ("data.train.path=null", "data.train.path is not set; data.train.kind=file needs it"),
    (
        "data.train.name=x",
        "data.train.name='x' is not read when data.train.kind=file; set it to null",
    ),
    ("data.train.params={a: 1}", "data.train.params={'a': 1} is not read .* set it to {}"),
    ("data.train.seed=3", "data.train.seed=3 is not read"),
    ("data.train.kind=python data.train.path=null", "data.train.name is not set"),
    ("data.train.kind=python data.train.name=m:f", "data.train.path='x.jsonl' is not read"),
    ("data.train.kind=python data.train.path=null data.train.name=f", "must read module:function"),
    (
        "data.train.kind=python data.train.path=null data.train.name=m:f data.train.split=a",
        "data.train.split='a' is not read",
    ),
    ("data.eval.kind=reasoning_gym data.eval.name=chain_sum", "data.eval.size is not set"),
    ("data.eval.kind=reasoning_gym data.eval.size=3", "data.eval.name is not set"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD, ids=[bad for bad, _ in BAD])
def test_refused(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check(*split(overrides))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        "algorithm.updates=64",
        "rollout.max_new_tokens=3584",
        "packing.micro_batch_tokens=1024",
        "packing.micro_batch_tokens=4096 mesh.data=2 mesh.fsdp=2",
        "mesh.data=8 mesh.fsdp=-1",
        "mesh.fsdp=1 mesh.tensor=-1",
        f"{GRPO} rollout.samples=2",
        f"{GRPO} algorithm.whiten=batch algorithm.group_scale=none",
        "algorithm.advantage_mode=returns algorithm.gae_over=response",
        "algorithm.lam_alpha=0.05 algorithm.value_lam=1 algorithm.nll_coef=0.1",
        "algorithm.truncated=soft algorithm.overlong_buffer=128 algorithm.overlong_penalty=2",
        "algorithm.truncated=bootstrap algorithm.missing_eos_penalty=1",
        "algorithm.kl_in=loss algorithm.kl_weighted=true",
        "algorithm.rejection=geometric algorithm.old_logprobs=rollout",
        "algorithm.rejection=token algorithm.rejection_low=1 algorithm.rejection_high=1.5",
        "rollout.samples=1",
        "critic.kind=model critic.path=m",
        "critic.trunk_gradient=false critic.warmup_iterations=99",
        "algorithm.kl_in=reward algorithm.kl_target=6",
        "algorithm.kl_in=loss algorithm.kl_kind=k2",
        "rollout.top_p=0.9 rollout.top_k=5 rollout.min_p=0.1 algorithm.importance=token",
        f"{SGLANG} rollout.max_staleness=3 algorithm.importance=sequence",
        f"{SGLANG} rollout.max_staleness=1 algorithm.old_logprobs=rollout",
        f"{SGLANG} rollout.router=http://r:1/ rollout.colocated=true rollout.publish_dir=x",
        "algorithm.old_logprobs=rollout",
        "optim.policy.warmup_steps=100 optim.policy.lr=0",
        "optim.value.max_grad_norm=0 checkpoint.every=0 eval.every=0 log.samples=0",
        "algorithm.gamma=0 algorithm.lam=1 algorithm.clip_high=5 algorithm.dual_clip=3",
        "logprob.chunk_size=null algorithm.value_clip=null rollout.stop_token_ids=[]",
        "data.system=hello data.train.split=train data.train.size=1",
        "data.eval.kind=reasoning_gym data.eval.name=chain_sum data.eval.size=3 data.eval.seed=9",
        "data.eval.kind=python data.eval.name=m:f data.eval.params={seed: 3}",
        "reward.functions=[{fn: m:f}, {fn: m.n:g.h, weight: -0.5}] model.make=m:f",
    ],
)
def test_allowed(overrides: str) -> None:
    check(*split(overrides))


@pytest.mark.parametrize(("key", "interval"), _RANGES.items())
def test_ranges_hold_at_their_ends(key: str, interval: str) -> None:
    setting = {s.key: s for s in settings()}[key]
    whole = "integer" in setting.allowed
    base = [*WORKING, "data.eval.path=y"] if key.startswith("data.eval") else WORKING
    low, high = (float(end) for end in interval[1:-1].split(","))
    outside = [low - 1] + ([low] if interval[0] == "(" else [])
    outside += [high] if interval[-1] == ")" else [high + 1]
    outside += [] if whole else [float("nan")]
    for value in outside:
        if whole and value == float("inf"):
            continue
        text = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(
            str(value), str(int(value) if whole else value)
        )
        with pytest.raises(ConfigError) as caught:
            check_config(load_config([], [*base, f"{key}={text}"]))
        assert f"{key}=" in str(caught.value) and interval in str(caught.value)


def test_every_number_has_a_range_or_a_rule_of_its_own() -> None:
    ruled = {"data.train.seed", "data.eval.seed", "mesh.data", "mesh.fsdp", "mesh.tensor"}
    # Entries of lists have their own rules, tested with those.
    numbers = {
        s.key
        for s in settings()
        if s.allowed.startswith(("an integer", "a number")) and "[i]" not in s.key
    }
    assert numbers == set(_RANGES) | ruled


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check("algorithm.updates=5", "critic.path=m", "rollout.top_k=3")
    assert len(str(caught.value).splitlines()) == 3


def split(overrides: str) -> list[str]:
    """At blanks that begin another key."""
    parts: list[str] = []
    for word in overrides.split(" "):
        if "=" in word and not word.startswith(("{", "[")) and "." in word.split("=")[0]:
            parts.append(word)
        elif "=" in word and word.split("=")[0].isidentifier():
            parts.append(word)
        else:
            parts[-1] += " " + word
    return parts

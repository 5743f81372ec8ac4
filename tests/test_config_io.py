"""Settings in and out: every wrong key and value is named, and what is written loads again."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import yaml

from jaxrl.config import Config, RewardFunctionConfig, SourceConfig
from jaxrl.config_checks import check_config
from jaxrl.config_io import config_to_dict, config_to_yaml, describe, load_config, save_config
from jaxrl.config_schema import settings
from jaxrl.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    file = tmp_path / "given.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config([file], overrides)


def test_nothing_given_is_the_defaults() -> None:
    assert load_config() == Config()


def test_defaults_then_files_left_to_right_then_overrides(tmp_path: Path) -> None:
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("seed: 1\niterations: 11\nalgorithm: {lam: 0.1, gamma: 0.2}\n")
    second.write_text("seed: 2\nalgorithm: {gamma: 0.3}\n")
    config = load_config([first, str(second)], ["algorithm.gamma=0.4", "algorithm.gamma=0.5"])
    assert (config.seed, config.iterations) == (2, 11)
    assert (config.algorithm.lam, config.algorithm.gamma) == (0.1, 0.5)
    assert config.algorithm.clip_low == Config().algorithm.clip_low
    assert load_config([second, first]).seed == 1


def test_a_section_of_its_own_default_keeps_it() -> None:
    config = load_config([], ["optim.value.beta1=0.5"])
    assert config.optim.value.lr == 1e-5 and config.optim.policy.lr == 1e-6


def test_numbers_keep_their_value(tmp_path: Path) -> None:
    text = """
    algorithm: {lam: 0.0, gamma: 1, kl_coef: 1e-5, clip_low: 1.5E-3, value_clip: null}
    optim: {policy: {weight_decay: 0, eps: .5}}
    seed: 010
    """
    config = load(tmp_path, text, "optim.value.lr=2e-5", "algorithm.entropy_coef=0.0")
    algorithm = config.algorithm
    assert algorithm.lam == 0.0 and algorithm.entropy_coef == 0.0 and algorithm.value_clip is None
    assert algorithm.gamma == 1.0 and isinstance(algorithm.gamma, float)
    assert (algorithm.kl_coef, algorithm.clip_low, config.optim.value.lr) == (1e-5, 1.5e-3, 2e-5)
    assert config.optim.policy.weight_decay == 0.0 and config.optim.policy.eps == 0.5
    assert config.seed == 10  # not octal


def test_words_that_yaml_1_1_takes_for_booleans_are_words(tmp_path: Path) -> None:
    text = "run_dir: no\nalgorithm: {kl_in: off, importance: off}\nlog: {tensorboard: off}\n"
    config = load(tmp_path, text, "log.progress=no")
    assert config.run_dir == "no" and config.algorithm.kl_in == config.algorithm.importance == "off"
    assert config.log.tensorboard is False and config.log.progress is False


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("learning_rte: 1", ["learning_rte", "optim.policy.lr or optim.value.lr"]),
        ("lam: 1", ["lam is not a setting", "did you mean algorithm.lam?"]),
        ("num-epochs: 3", ["num-epochs", "did you mean algorithm.epochs?"]),
        ("algoritm: {lam: 1}", ["algoritm", "did you mean algorithm?"]),
        ("algorithm: {gama: 1}", ["algorithm.gama", "did you mean algorithm.gamma?", "clip_low"]),
        ("optim: {policy: {l_r: 1}}", ["optim.policy.l_r", "did you mean optim.policy.lr?"]),
        ("data: {eval: {nme: x}}", ["data.eval.nme", "did you mean data.eval.name?"]),
        (
            "reward: {functions: [{fn: a:b}, {fn: a:c, wieght: 2}]}",
            ["reward.functions[1].wieght", "did you mean reward.functions[1].weight?"],
        ),
        ("xyzzy: 1", ["xyzzy is not a setting", "run_dir, seed"]),
    ],
)
def test_unknown_keys_are_named_with_the_nearest(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    for part in [*parts, "given.yaml"]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lam=1", "did you mean algorithm.lam"),
        ("algorithm.gama=1", "did you mean algorithm.gamma"),
        ("data.eval.nme=x", "did you mean data.eval.name"),
        ("optim.policy={l_r: 1}", "did you mean optim.policy.lr"),
        ("reward.functions=[{wieght: 1}]", r"did you mean reward.functions\[0\].weight"),
        ("algorithm.lam.x=1", "algorithm.lam is a number, so it has no 'x'"),
        ("reward.functions.0.fn=x", r"no '0' in it; an entry is reached as \[0\]"),
        ("reward.functions[0].fn=x", r"has 0 entries, so there is no \[0\]"),
        ("packing.row_lengths[5]=9", r"has 5 entries, so there is no \[5\]"),
        ("algorithm..lam=1", "is not an override"),
        ("algorithm.lam", "is not an override; write key.sub=value"),
        ("=1", "is not an override"),
        ("iterations=", "has no value; write iterations=null"),
        ("data.system= ", "has no value"),
        ("iterations=null", r"iterations is empty \(null\) but must be an integer"),
        ("iterations=2.7", "iterations=2.7 must be an integer; it is not rounded"),
        ("iterations=1e3", "write 1000"),
        ("iterations=true", "iterations=True must be an integer"),
        ("iterations=ten", "iterations='ten' must be an integer"),
        ("algorithm.lam=abc", "algorithm.lam='abc' must be a number"),
        ("algorithm.lam=true", "algorithm.lam=True must be a number"),
        ("log.progress=1", "log.progress=1 must be true or false"),
        ("log.progress=maybe", "log.progress='maybe' must be true or false"),
        ("run_dir=3", "run_dir=3 must be a string; put it in quotes"),
        ("run_dir=true", "run_dir=True must be a string; put it in quotes"),
        ("run_dir=???", "must be a string"),
        (
            "algorithm.kl_in=lss",
            "algorithm.kl_in='lss' must be one of off, report, reward, loss; did you mean loss?",
        ),
        ("algorithm=3", "algorithm=3 must be a section with the keys advantage_mode"),
        ("algorithm=null", "algorithm is empty"),
        ("packing.row_lengths=[1, 2.5]", r"packing.row_lengths\[1\]=2.5 must be an integer"),
        ("packing.row_lengths=64", "packing.row_lengths=64 must be a list of ints"),
        ("data.train.params={1: 2}", "must be a mapping with string keys"),
        ("data.train.params=3", "must be a mapping with string keys"),
        ("seed=[", "seed: not valid YAML"),
        ("model.path=${nope}/x", "model.path: Interpolation key 'nope' not found"),
        ("model.path=${model.path}", "model.path: Recursive"),
        ("iterations=${algorithm.lam}", "iterations: .*could not be converted to Integer"),
        ("algorithm.kl_in=${run_dir}", "algorithm.kl_in: .*expected one of"),
        ('algorithm.lam="${algorithm.lam"', "algorithm.lam: not a reference"),
    ],
)
def test_wrong_overrides_say_what_is_wrong(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([], [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "given.yaml: holds no settings"),
        ("- 1\n", "must be a section with the keys run_dir"),
        ("seed: [", "given.yaml: not valid YAML.*line 1"),
        ("iterations: 5\nseed: 1\niterations: 6\n", "'iterations' is given twice.*line 3"),
        ("algorithm:\n", r"algorithm is empty \(null\)"),
        ('iterations: "3"\n', "iterations='3' must be an integer"),
        ("reward: {functions: {fn: a}}", "reward.functions=.* must be a list of section"),
        ("reward: {functions: [a:b]}", r"reward.functions\[0\]='a:b' must be a section"),
        ("data: {train: x.jsonl}", "data.train='x.jsonl' must be a section"),
    ],
)
def test_wrong_files_say_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_missing_and_binary_files_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.yaml: cannot be read"):
        load_config([tmp_path / "nowhere.yaml"])
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary.yaml: cannot be read"):
        load_config([tmp_path / "binary.yaml"])


def test_overrides_reach_lists_mappings_and_optional_sections(tmp_path: Path) -> None:
    text = """
    reward: {functions: [{fn: a:b}, {fn: a:c}]}
    data: {train: {params: {old: 1, kept: 2}}}
    """
    config = load(
        tmp_path,
        text,
        "reward.functions[1].weight=2",
        "packing.row_lengths[0]=64",
        "data.train.params.new.deep=[1, x]",
        "data.eval.kind=python",
        "data.eval.name=m:f",
        "algorithm={lam: 0.5}",
        "reward.functions[0]={weight: 3}",
        "data.system=a = b",
    )
    assert config.reward.functions == [
        RewardFunctionConfig("a:b", weight=3.0),
        RewardFunctionConfig("a:c", weight=2.0),
    ]
    assert config.packing.row_lengths == [64, 512, 1024, 2048, 4096]
    assert config.data.train.params == {"old": 1, "kept": 2, "new": {"deep": [1, "x"]}}
    assert config.data.eval == SourceConfig(kind="python", name="m:f")
    assert config.algorithm == dataclasses.replace(Config().algorithm, lam=0.5)
    assert config.data.system == "a = b"
    assert load(tmp_path, text, "data.train.params={new: 3}").data.train.params == {"new": 3}
    assert load(tmp_path, "data: {eval: {path: x}}", "data.eval=null").data.eval is None
    with pytest.raises(ConfigError, match="data.train.params.old.x: 1 is there, which has no 'x'"):
        load(tmp_path, text, "data.train.params.old.x=1")


def test_lists_are_replaced_not_joined(tmp_path: Path) -> None:
    config = load(tmp_path, "rollout: {stop_token_ids: [1, 2]}", "rollout.stop_token_ids=[3]")
    assert config.rollout.stop_token_ids == [3]


def test_references_to_other_settings(tmp_path: Path) -> None:
    text = """
    run_dir: runs/${seed}
    model: {path: "${run_dir}/base"}
    optim: {value: "${optim.policy}"}
    checkpoint: {every: "${iterations}"}
    data: {eval: "${data.train}", train: {params: {seed: "${seed}"}}}
    """
    config = load(tmp_path, text, "seed=7", "optim.policy.lr=3e-4")
    assert config.run_dir == "runs/7" and config.model.path == "runs/7/base"
    assert config.optim.value == config.optim.policy and config.optim.value.lr == 3e-4
    assert config.checkpoint.every == config.iterations
    assert config.data.eval == config.data.train and config.data.train.params == {"seed": 7}
    with pytest.raises(ConfigError, match="optim.value.lr: the section is '\\${optim.policy}'"):
        load(tmp_path, text, "optim.value.lr=1")


def awkward() -> Config:
    """A config with what YAML is most likely to change."""
    config = Config()
    params = {"off": "off", "exp": "1e-5", "int": "012", "time": "1:30", "none": "null", "f": 1e-7}
    train = SourceConfig(
        kind="python", name="m:f", params=params | {"list": [None, True, {"a": 1}]}
    )
    data = dataclasses.replace(
        config.data, train=train, system="cost ${seed} \\${x}\n'quotes' \"é\u2028\" # no: comment"
    )
    algorithm = dataclasses.replace(config.algorithm, kl_in="off", lam=0.0, value_clip=None)
    optim = dataclasses.replace(
        config.optim,
        policy=dataclasses.replace(config.optim.policy, lr=1e-5, max_grad_norm=math.inf),
    )
    reward = dataclasses.replace(config.reward, functions=[RewardFunctionConfig("a:b", -1.0)])
    return dataclasses.replace(
        config, run_dir="yes", data=data, algorithm=algorithm, optim=optim, reward=reward
    )


@pytest.mark.parametrize("config", [Config(), awkward()], ids=["defaults", "awkward"])
def test_what_is_written_loads_again_equal(tmp_path: Path, config: Config) -> None:
    file = tmp_path / "new" / "config.yaml"
    save_config(config, file)
    assert load_config([file]) == config
    assert file.read_text(encoding="utf-8") == config_to_yaml(config)
    assert [path.name for path in file.parent.iterdir()] == ["config.yaml"]


def test_written_yaml_has_every_key_nulls_too_and_reads_alike_elsewhere() -> None:
    text = config_to_yaml(awkward())
    assert "value_clip: null" in text and "stop_token_ids: null" in text
    plain = yaml.safe_load(text)  # a YAML 1.1 reader
    assert plain["algorithm"]["kl_in"] == "off" and plain["run_dir"] == "yes"
    assert plain["optim"]["policy"]["lr"] == 1e-5
    assert plain["data"]["train"] == config_to_dict(awkward())["data"]["train"]
    assert list(plain) == [field.name for field in dataclasses.fields(Config)]


def test_every_setting_is_described() -> None:
    listed = {setting.key: setting for setting in settings()}
    undocumented = [key for key, setting in listed.items() if not setting.doc]
    assert undocumented == []
    assert listed["optim.value.lr"].default == 1e-5
    assert listed["algorithm.kl_in"].allowed == "one of off, report, reward, loss"
    assert listed["logprob.chunk_size"].allowed == "an integer, or null"
    assert {"reward.functions[i].weight", "data.eval.kind", "run_dir"} <= set(listed)
    text = describe()
    assert "algorithm.lam = 0.95   (a number)\n    GAE's lambda (Schulman et al. 2016)." in text
    assert all(setting.key in text and setting.doc in text for setting in listed.values())


def test_every_described_key_can_be_set() -> None:
    given = [s for s in settings() if "[i]" not in s.key and s.default not in (None, [], {})]
    assert len(given) > 50
    config = load_config([], [f"{s.key}={json.dumps(s.default)}" for s in given])
    assert dataclasses.replace(config, data=Config().data) == Config()
    assert config.data.eval == SourceConfig()


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_load_and_can_work(file: Path, tmp_path: Path) -> None:
    """Those that are put behind another, behind the tiny one."""
    before = [file.with_name("tiny.yaml")] if file.name.startswith("with_") else []
    config = load_config([*before, file])
    check_config(config)
    head = file.read_text(encoding="utf-8")
    assert head.startswith("# ") and "# Hardware:" in head and "# Command:" in head
    save_config(config, tmp_path / "again.yaml")
    assert load_config([tmp_path / "again.yaml"]) == config


def test_there_are_shipped_configs() -> None:
    assert CONFIGS

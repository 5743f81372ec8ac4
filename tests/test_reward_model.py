"""Reward models against transformers' own classifiers, and as a part of the score."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxrl.config import RewardConfig, RewardFunctionConfig, RewardModelConfig
from jaxrl.errors import RewardError
from jaxrl.reward_model import RewardModel, plan_scores
from jaxrl.reward_request import Asked
from jaxrl.scoring import Scorer
from jaxrl.types import Prompt
from tests.classifiers import FAMILIES, change_config, save_model, save_tokenizer

PROMPTS = ["abc", "hello there ", "0 + 1 = ", "z", "the quick brown fox jumps over "]
COMPLETIONS = ["def", "you", "1", "zzz", "a lazy dog"]


def asked(prompts: list[str], completions: list[str]) -> Asked:
    made = [
        Prompt(row=i, ids=(1,), text=text, messages=chat(text), columns={})
        for i, text in enumerate(prompts)
    ]
    return Asked(made, completions, [[7]] * len(completions))


def chat(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "system", "content": "be good"}, {"role": "user", "content": text})


def load(folder: Path, **keys: Any) -> RewardModel:
    return RewardModel(RewardModelConfig(path=str(folder), **keys), key="reward.models[0]")


def rewards(model: RewardModel, prompts: list[str], completions: list[str]) -> np.ndarray:
    (given,) = model.ask(asked(prompts, completions))
    return np.array(given)


def scores(folder: Path, prompts: list[str], completions: list[str], **keys: Any) -> np.ndarray:
    return rewards(load(folder, **keys), prompts, completions)


def torch_score(model: Any, ids: list[int]) -> float:
    """One text alone, not padded; transformers must not look for padding in it."""
    model.config.pad_token_id = None
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits[0, 0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rm")
    save_model(folder)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_transformers_in_a_padded_batch(family: str, tmp_path: Path) -> None:
    reference = save_model(tmp_path, family)
    save_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [prompt + completion for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert not batch["attention_mask"].all()
    with torch.no_grad():
        expected = reference(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    ours = scores(tmp_path, PROMPTS, COMPLETIONS, chat=False)
    assert np.ptp(expected.numpy()) > 0.5
    np.testing.assert_allclose(ours, expected[:, 0].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
def test_a_chat_goes_through_the_models_own_template_and_ends_with_its_last_token(
    pad: str, tmp_path: Path
) -> None:
    # The template ends with <eos>; where that is the padding token too, it is still read.
    reference = save_model(tmp_path, pad_token_id=1 if pad == "<eos>" else 0)
    save_tokenizer(tmp_path, pad=pad)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        text = f"s>be good<eos>u>{prompt}<eos>a>{completion}<eos>"
        ids = tokenizer(text)["input_ids"]
        assert ids.count(1) == 3 and ids[-1] == 1
        expected.append(torch_score(reference, ids))
    ours = scores(tmp_path, PROMPTS, COMPLETIONS)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


def test_a_score_does_not_depend_on_its_company(folder: Path) -> None:
    whole, split = load(folder), load(folder, batch_tokens=64, max_tokens=64)
    together = rewards(whole, PROMPTS, COMPLETIONS)
    alone = [rewards(whole, [p], [c])[0] for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rewards(split, PROMPTS, COMPLETIONS), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("chatting", "prompt", "text"),
    [
        (True, "ab", "s>be good<eos>u>ab<eos>a>c<eos>"),  # the template's alone
        (False, "ab", "<eos>abc"),
        (False, "<eos>ab", "<eos>abc"),  # there already
    ],
)
def test_special_tokens_come_once(chatting: bool, prompt: str, text: str, tmp_path: Path) -> None:
    reference = save_model(tmp_path)
    save_tokenizer(tmp_path, bos=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("a")["input_ids"] == [1, 2]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ours = scores(tmp_path, [prompt], ["c"], chat=chatting)
    np.testing.assert_allclose(ours, [torch_score(reference, ids)], rtol=1e-4, atol=1e-4)
    assert abs(torch_score(reference, [1, *ids]) - ours[0]) > 1e-3


def test_of_a_long_text_the_last_tokens_are_read(tmp_path: Path) -> None:
    reference = save_model(tmp_path)
    save_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("the quick brown fox a lazy dog")["input_ids"]
    ours = scores(tmp_path, ["the quick brown fox "], ["a lazy dog"], chat=False, max_tokens=13)
    expected = torch_score(reference, ids[-13:])
    np.testing.assert_allclose(ours, [expected], rtol=1e-4, atol=1e-4)
    assert abs(expected - torch_score(reference, ids)) > 1e-2


def test_bfloat16_is_near_and_scores_stay_float32(folder: Path) -> None:
    exact = scores(folder, PROMPTS, COMPLETIONS)
    near = scores(folder, PROMPTS, COMPLETIONS, dtype="bfloat16")
    assert 1e-6 < np.abs(near - exact).max() < 0.2
    model = load(folder, dtype="bfloat16")
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(model._params["layers"])}
    assert kinds == {"bfloat16"}
    assert model._params["value_head"]["kernel"].dtype == np.float32


ON_MESHES = """
import json, sys, jax
from jaxrl.config import MeshConfig, RewardModelConfig
from jaxrl.reward_model import RewardModel
from jaxrl.sharding import make_mesh
from tests.test_reward_model import COMPLETIONS, PROMPTS, rewards
for sizes in ({"data": 4}, {"data": 2, "tensor": 2}, {"data": 1, "fsdp": 2, "tensor": 2}):
    mesh = make_mesh(MeshConfig(**{"data": 1, "fsdp": 1, "tensor": 1} | sizes))
    settings = RewardModelConfig(path=sys.argv[1], max_tokens=64, batch_tokens=128)
    model = RewardModel(settings, key="k", mesh=mesh)
    print(json.dumps(rewards(model, PROMPTS, COMPLETIONS).tolist()))
"""


def test_scores_are_the_same_on_every_mesh(folder: Path) -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-c", ON_MESHES, str(folder)],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    expected = scores(folder, PROMPTS, COMPLETIONS)
    for line in lines:
        np.testing.assert_allclose(json.loads(line), expected, rtol=1e-4, atol=1e-5)


def test_it_ranks_texts_by_what_it_was_fitted_to(tmp_path: Path) -> None:
    """A row fitted by least squares to the share of the letter a ranks texts it has not seen."""
    reference = save_model(tmp_path)
    save_tokenizer(tmp_path)
    rng = np.random.default_rng(0)

    def texts(count: int) -> tuple[list[str], np.ndarray]:
        made = [
            "".join(rng.choice(list("abcdef"), 12, p=[share, *[(1 - share) / 5] * 5]))
            for share in rng.random(count)
        ]
        return made, np.array([text.count("a") / len(text) for text in made])

    train, shares = texts(300)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        ids = tokenizer(train, return_tensors="pt")["input_ids"]
        features = reference.model(ids).last_hidden_state[:, -1].numpy()
    row, *_ = np.linalg.lstsq(features, shares - shares.mean(), rcond=None)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["score.weight"] = row[None].astype(np.float32)
    save_file(tensors, tmp_path / "model.safetensors")

    fresh, shares = texts(100)
    given = asked([""] * 100, fresh)
    models = [RewardModelConfig(path=str(tmp_path), chat=False)]
    with Scorer(RewardConfig(models=models)) as scorer:
        values = scorer.score(given.prompts, given.completions, given.completion_ids).values
    clearly = [(i, j) for i in range(100) for j in range(100) if shares[i] > shares[j] + 0.3]
    right = np.mean([values[i] > values[j] for i, j in clearly])
    assert len(clearly) > 1000 and right > 0.95


# What is refused.


def refused(folder: Path, message: str, **keys: Any) -> None:
    with pytest.raises(RewardError, match=rf"(?s)reward.models\[3\].path='{folder}' .*{message}"):
        RewardModel(RewardModelConfig(path=str(folder), **keys), key="reward.models[3]")


def test_language_models_other_label_counts_and_foreign_architectures_are_refused(
    tmp_path: Path,
) -> None:
    lm, two = tmp_path / "lm", tmp_path / "two"
    save_model(lm, kind="lm")
    refused(lm, "it is a language model; a reward model is a sequence classifier")
    change_config(lm, architectures=["Qwen3ForTokenClassification"], num_labels=1)
    refused(lm, "it is a token classifier; a reward model is a sequence classifier")
    save_model(two, num_labels=2)
    save_tokenizer(two)
    refused(two, "2 labels; .* must have num_labels=1")
    change_config(two, id2label={"0": "LABEL_0"})
    refused(two, r"wrong shape: score.weight \[2, 32\], expected \[1, 32\]")
    change_config(two, id2label={"0": "LABEL_0"}, num_labels=3)
    refused(two, "num_labels gives 3 labels")
    change_config(two, architectures=["LlamaForSequenceClassification"], num_labels=1)
    refused(two, r"must be \['Qwen3ForSequenceClassification'\]")
    change_config(two, architectures=["BertForSequenceClassification"], model_type="bert")
    refused(two, "model_type='bert' is not supported")
    refused(tmp_path / "none", "is no folder")


def test_missing_and_left_over_tensors_are_named(tmp_path: Path) -> None:
    save_model(tmp_path)
    save_tokenizer(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    score = tensors.pop("score.weight")
    save_file(tensors | {"score.bias": np.zeros(1, np.float32)}, file)
    refused(tmp_path, r"2 tensor.*missing: score.weight.*unexpected: score.bias \[1\]")
    head = np.zeros((48, 32), np.float32)
    save_file(tensors | {"score.weight": score, "lm_head.weight": head}, file)
    refused(tmp_path, r"unexpected: lm_head.weight \[48, 32\]")


def test_tokenizers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    refused(tmp_path, "holds no tokenizer")
    save_tokenizer(tmp_path, template=None)
    refused(tmp_path, r"no chat template; set reward.models\[3\].chat=false")
    assert scores(tmp_path, ["a"], ["b"], chat=False).shape == (1,)
    save_model(tmp_path, vocab_size=20)
    refused(tmp_path, "max tokenizer id 41", chat=False)


def test_a_default_of_two_labels_is_not_taken_for_one(tmp_path: Path) -> None:
    save_model(tmp_path)
    save_tokenizer(tmp_path)
    change_config(tmp_path, id2label=None, label2id=None)
    refused(tmp_path, r"num_labels \(the default\) gives 2 labels")


def test_prompts_it_cannot_read_are_found_by_probe(folder: Path, tmp_path: Path) -> None:
    plain = Prompt(row=4, ids=(1,), text="plain", columns={})
    good = asked(["a", "b"], ["", ""]).prompts
    with Scorer(RewardConfig(models=[RewardModelConfig(path=str(folder))])) as scorer:
        scorer.probe(good)
        with pytest.raises(RewardError, match=r"row 4, prompt 'plain' is plain text; set .*chat="):
            scorer.probe([*good, plain])
    with (
        Scorer(RewardConfig(models=[RewardModelConfig(path=str(folder), chat=False)])) as scorer,
        pytest.raises(RewardError, match="there is no text to read, row 0"),
    ):
        scorer.probe(asked([""], [""]).prompts)


def test_a_plain_text_is_never_scored_as_half_a_chat(folder: Path) -> None:
    plain = Prompt(row=4, ids=(1,), text="plain", columns={})
    with pytest.raises(RewardError, match="row 4, prompt 'plain' is plain text"):
        next(load(folder).ask(Asked([plain], ["abc"], [[7]])))


def test_a_template_that_refuses_names_the_row(tmp_path: Path) -> None:
    save_model(tmp_path)
    save_tokenizer(tmp_path, template="{{ raise_exception('no system please') }}")
    with pytest.raises(RewardError, match="refuses row 0, prompt 'abc' .no system please"):
        scores(tmp_path, PROMPTS, COMPLETIONS)


def test_functions_and_models_are_weighted_and_have_metrics_of_their_own(folder: Path) -> None:
    reward = RewardConfig(
        functions=[RewardFunctionConfig(fn="jaxrl.reward_functions:exact_match", weight=10.0)],
        models=[
            RewardModelConfig(path=str(folder), weight=2.0),
            RewardModelConfig(path=str(folder), weight=-0.5, chat=False),
        ],
    )
    prompts = [
        Prompt(row=i, ids=(1,), text=text, messages=chat(text), columns={"answer": "you"})
        for i, text in enumerate(PROMPTS)
    ]
    with Scorer(reward) as scorer:
        given = scorer.score(prompts, COMPLETIONS, [[7]] * 5)
    chats = scores(folder, PROMPTS, COMPLETIONS)
    plain = scores(folder, PROMPTS, COMPLETIONS, chat=False)
    right = np.array([0, 1, 0, 0, 0])
    np.testing.assert_allclose(given.values, 10 * right + 2 * chats - 0.5 * plain, rtol=1e-5)
    assert list(given.per_function) == [
        "jaxrl.reward_functions:exact_match",
        f"model:{folder.name}",
        f"model:{folder.name}#2",
    ]
    np.testing.assert_allclose(given.per_function[f"model:{folder.name}#2"], plain, rtol=1e-5)
    assert given.valid.all() and given.tokens == ()


def test_a_score_that_is_not_finite_is_a_matter_for_on_invalid(tmp_path: Path) -> None:
    save_model(tmp_path)
    save_tokenizer(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["score.weight"] = np.full((1, 32), np.nan, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    models = [RewardModelConfig(path=str(tmp_path), chat=False)]
    given = asked(["a"], ["b"])
    with Scorer(RewardConfig(models=models, on_invalid="drop")) as scorer:
        scored = scorer.score(given.prompts, given.completions, given.completion_ids)
        assert not scored.valid.any()
    with (
        Scorer(RewardConfig(models=models)) as scorer,
        pytest.raises(RewardError, match=f"reward model {tmp_path} returned nan for completion 0"),
    ):
        scorer.score(given.prompts, given.completions, given.completion_ids)


# Shapes.


@given(
    st.lists(st.integers(1, 200), max_size=60),
    st.sampled_from([200, 1024, 4096]),
    st.sampled_from([1, 2, 3]),
)
def test_every_text_is_in_one_batch_that_holds_it(
    lengths: list[int], batch_tokens: int, multiple: int
) -> None:
    batches = plan_scores(lengths, batch_tokens, 200, row_multiple=multiple)
    assert sorted(i for batch in batches for i in batch.texts) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch.texts) <= batch.rows and batch.rows % multiple == 0
        assert all(lengths[i] <= batch.columns for i in batch.texts)
        assert batch.columns <= 200
        assert batch.rows * batch.columns <= max(batch_tokens, multiple * batch.columns)


def test_few_shapes_are_compiled() -> None:
    rng = np.random.default_rng(0)
    shapes = {
        (batch.rows, batch.columns)
        for _ in range(50)
        for batch in plan_scores(rng.integers(100, 1000, 64).tolist(), 8192, 4096)
    }
    assert len(shapes) < 30

"""The tiny model: what is written, how the warm-up stops, and that it measures what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from jaxrl import tiny
from jaxrl.errors import TrainingError
from jaxrl.models import Model, weight_table
from jaxrl.tasks import reverse_letters
from jaxrl.types import Trajectory

SMALL = replace(
    tiny.tiny_config(), num_hidden_layers=1, hidden_size=32, intermediate_size=32, head_dim=8
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "base"
    tiny.make(str(path), 0)
    return path


def test_make_writes_a_model_that_transformers_reads_and_that_half_knows_the_task(
    folder: Path,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == 793_216
    rows = list(reverse_letters(split="test", size=100))
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)[
        :, inputs.input_ids.shape[1] :
    ]
    answers = tokenizer.batch_decode(ids, skip_special_tokens=True)
    right = np.mean([answer == row["answer"] for answer, row in zip(answers, rows, strict=True)])
    # Greedy lies above the sampled .15 at which the warm-up stops; at 1 nothing is left to learn.
    assert 0.1 < right < 0.99


def test_tokenizer_is_one_token_a_character_and_comes_back_unchanged(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "".join(tiny.CHARACTERS)
    ids = tokenizer(text)["input_ids"]
    assert ids == list(range(2, 42)) and tokenizer.decode(ids) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 42)
    assert tokenizer("ab<eos>")["input_ids"] == [2, 3, 1]
    assert tokenizer.decode([2, 3, 1, 0], skip_special_tokens=True) == "ab"


def test_tokenizer_refuses_a_character_it_does_not_know() -> None:
    with pytest.raises(Exception, match="UNK"):
        tiny.tiny_tokenizer().encode("A")


def test_config_has_the_advertised_size() -> None:
    assert sum(int(np.prod(w.full_shape)) for w in weight_table(tiny.tiny_config())) == 793_216


def test_no_word_of_the_warm_up_is_seen_again() -> None:
    questions, lessons = tiny._words(0)
    tokenizer = tiny.tiny_tokenizer()
    rows = [*questions.tokens, *lessons.tokens]
    words = [tokenizer.decode(list(tokens[:7])) for tokens in rows]
    assert len(questions.tokens) == 256 and len(set(words)) == len(words)
    for split in ("train", "test"):
        taken = {row["prompt"] for row in reverse_letters(split=split, size=20_000)}
        assert taken.isdisjoint(words)


def test_a_step_descends_the_cross_entropy_of_answer_and_end_of_sequence() -> None:
    model = Model(SMALL, remat="none")
    params = jax.jit(model.init)(jax.random.key(1))
    examples = tiny._encode([{"prompt": "ab>", "answer": "ba"}, {"prompt": "xy>", "answer": "yx"}])
    assert examples.tokens.tolist() == [[2, 3, 41, 3, 2, 1], [25, 26, 41, 26, 25, 1]]

    def reference(params: dict) -> jax.Array:
        places = jnp.broadcast_to(jnp.arange(6), (2, 6))
        hidden = model.hidden(params, jnp.asarray(examples.tokens), places, jnp.ones_like(places))
        logprobs = jax.nn.log_softmax(hidden @ model.head(params))
        total = 0.0
        for row in range(2):
            for t in (3, 4, 5):
                total -= logprobs[row, t - 1, examples.tokens[row, t]]
        return total / 6

    expected = jax.tree.map(lambda p, g: p - g, params, jax.jit(jax.grad(reference))(params))
    optimizer = optax.sgd(1.0)
    step = tiny._make_step(model, optimizer)
    found, _ = step(params, optimizer.init(params), examples.tokens, examples.prompt_length)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


class _Answers:
    """An engine that answers with given token ids."""

    def __init__(self, responses: list[tuple[int, ...]]) -> None:
        self.responses = responses

    def generate(self, prompts: list, *, samples: int, sampling: object, seed: int) -> list:
        return [
            Trajectory(
                prompt=prompt,
                sample=0,
                response_ids=ids,
                logprobs=(0.0,) * len(ids),
                finish_reason="stop" if ids[-1] == 1 else "length",
            )
            for prompt, ids in zip(prompts, self.responses, strict=True)
        ]


def test_accuracy_counts_exact_answers_that_end() -> None:
    questions = tiny._encode([{"prompt": "ab>", "answer": "ba"}] * 4)
    responses = [(3, 2, 1), (2, 3, 1), (3, 2, 5), (3, 1)]
    assert tiny._sampled_accuracy(_Answers(responses), questions, seed=0) == 0.25


def test_warm_up_stops_at_the_first_check_that_reaches_the_accuracy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = iter([0.0, 0.149, 0.15, 1.0])
    monkeypatch.setattr(tiny, "_sampled_accuracy", lambda *args, **kwargs: next(measured))
    warm = tiny.warm_up(Model(SMALL, remat="none"), 0)
    assert (warm.steps, warm.accuracy) == (60, 0.15)


def test_the_same_seed_gives_the_same_model_and_another_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiny, "_CHECK_EVERY", 2)
    monkeypatch.setattr(tiny, "_sampled_accuracy", lambda *args, **kwargs: 1.0)
    model = Model(SMALL, remat="none")
    first, same, other = (tiny.warm_up(model, seed).params for seed in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, first, same)
    assert not np.array_equal(first["embed"]["weight"], other["embed"]["weight"])


def test_a_warm_up_that_fails_says_so_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "_MOST_STEPS", 20)
    monkeypatch.setattr(tiny, "tiny_config", lambda: SMALL)
    monkeypatch.setattr(tiny, "_sampled_accuracy", lambda *args, **kwargs: 0.1)
    with pytest.raises(TrainingError, match="0.100 in 20 steps, short of 0.15; use another seed"):
        tiny.make(str(tmp_path / "base"), 5)
    assert list(tmp_path.iterdir()) == []

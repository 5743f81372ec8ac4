"""A tiny Qwen3 with a character tokenizer, made on the spot, for runs and tests without a download.

A model with random weights earns no reward, so it is first shown the task for a few seconds, and
only until it has begun to grasp it: what is left is for PPO to learn.
"""

from __future__ import annotations

import string
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from jaxrl.checkpoint.hf_export import export_hf
from jaxrl.checkpoint.hf_files import write_json
from jaxrl.errors import TrainingError
from jaxrl.logprobs import token_logprobs
from jaxrl.models import Model, ModelConfig
from jaxrl.rollout.trainside import TrainsideEngine
from jaxrl.tasks import reverse_letters
from jaxrl.types import Prompt, Sampling

__all__ = ["CHARACTERS", "WarmUp", "make", "tiny_config", "tiny_tokenizer", "warm_up"]

PAD, EOS = "<pad>", "<eos>"
_PAD_ID, _EOS_ID = 0, 1
CHARACTERS = (*string.ascii_lowercase, *string.digits, " ", "+", "=", ">")
"""Every character the tokenizer knows; ids 0 and 1 are padding and the end of the sequence."""

_BATCH = 64
_CHECK_EVERY = 20
_MOST_STEPS = 400
_VALIDATION_ROWS = 256


class WarmUp(NamedTuple):
    """How a warm-up ended."""

    params: dict[str, Any]
    steps: int
    accuracy: float
    """Share of the validation prompts answered exactly, sampled at temperature 1."""


def make(folder: str, seed: int) -> None:
    """Write the tiny model to `folder`, as a Hugging Face folder, whole or not at all.

    This is what `model.make: jaxrl.tiny:make` calls when `model.path` does not exist yet.

    Args:
        folder: The folder to write; an older model there is replaced.
        seed: Seeds the weights and the warm-up's data; the same seed gives the same model.

    Raises:
        TrainingError: When the warm-up does not get there; another seed may.
    """
    config = tiny_config()
    warm = warm_up(Model(config, remat="none"), seed)
    print(
        f"{folder}: tiny model after {warm.steps} supervised steps;"
        f" sampled validation accuracy {warm.accuracy:.3f}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as source:
        _write_source(Path(source), config)
        export_hf(folder, warm.params, config, source=source)


def tiny_config() -> ModelConfig:
    """Four layers of Qwen3, 793,216 parameters."""
    return ModelConfig(
        model_type="qwen3",
        vocab_size=2 + len(CHARACTERS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )


def tiny_tokenizer() -> Tokenizer:
    """One token a character of `CHARACTERS`; any other character is refused."""
    vocabulary = {token: i for i, token in enumerate((PAD, EOS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, EOS)])
    return tokenizer


def warm_up(model: Model, seed: int, *, accuracy: float = 0.15) -> WarmUp:
    """Supervised training on reversed letters, stopped early by sampled accuracy.

    AdamW at 1e-3 after 20 steps of linear warm-up, batches of 64, cross-entropy of the answer and
    the end of the sequence. Accuracy is measured every 20 steps on a validation set of its own;
    neither set shares a prompt with those that PPO trains on and is tested on.

    Args:
        model: The decoder, with the vocabulary of `tiny_tokenizer`.
        seed: Seeds weights, data and sampling.
        accuracy: Stop at the first check that reaches it, in (0, 1].

    Raises:
        TrainingError: When 400 steps do not reach it.
    """
    params = jax.jit(model.init)(jax.random.key(seed))
    optimizer = optax.adamw(optax.linear_schedule(0.0, 1e-3, 20), weight_decay=0.0)
    opt_state = optimizer.init(params)
    step = _make_step(model, optimizer)
    engine = TrainsideEngine(model, batch_size=_VALIDATION_ROWS)
    questions, lessons = _words(seed)
    reached = 0.0
    for done in range(1, _MOST_STEPS + 1):
        batch = lessons.tokens[(done - 1) * _BATCH : done * _BATCH]
        params, opt_state = step(params, opt_state, batch, lessons.prompt_length)
        if done % _CHECK_EVERY == 0:
            engine.publish(params, done)
            reached = _sampled_accuracy(engine, questions, seed=done)
            if reached >= accuracy:
                return WarmUp(params, done, reached)
    raise TrainingError(
        f"the tiny model's warm-up reached accuracy {reached:.3f} in {_MOST_STEPS} steps, short of"
        f" {accuracy}; use another seed than {seed}"
    )


class _Examples(NamedTuple):
    tokens: np.ndarray
    """int32 [rows, time]: prompt, answer, end of sequence; all rows are equally long."""
    prompt_length: int


def _words(seed: int) -> tuple[_Examples, _Examples]:
    """Validation questions and lessons: different words, none of them one that PPO meets."""
    size = _VALIDATION_ROWS + _BATCH * _MOST_STEPS
    rows = list(reverse_letters(split="validation", seed=seed, size=size))
    return _encode(rows[:_VALIDATION_ROWS]), _encode(rows[_VALIDATION_ROWS:])


def _encode(rows: Sequence[Mapping[str, Any]]) -> _Examples:
    tokenizer = tiny_tokenizer()
    texts = [row["prompt"] + row["answer"] + EOS for row in rows]
    tokens = np.asarray([encoding.ids for encoding in tokenizer.encode_batch(texts)], np.int32)
    return _Examples(tokens, len(rows[0]["prompt"]))


def _make_step(model: Model, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def loss(params: Any, tokens: jax.Array, prompt_length: int) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = model.hidden(params, tokens, positions, jnp.ones_like(tokens))
        predicting = slice(prompt_length - 1, -1)
        logprobs = token_logprobs(
            hidden[:, predicting], model.head(params), tokens[:, prompt_length:]
        )
        return -logprobs.mean()

    @partial(jax.jit, static_argnums=3, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, tokens: jax.Array, prompt_length: int) -> Any:
        gradient = jax.grad(loss)(params, tokens, prompt_length)
        changes, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, changes), opt_state

    return step


def _sampled_accuracy(engine: TrainsideEngine, questions: _Examples, seed: int) -> float:
    """Share of the questions whose completion, end of sequence included, is the expected one."""
    length = questions.prompt_length
    prompts = [
        Prompt(row=i, ids=tuple(map(int, tokens[:length])), text="", columns={})
        for i, tokens in enumerate(questions.tokens)
    ]
    sampling = Sampling(
        max_new_tokens=questions.tokens.shape[1] - length, stop_token_ids=(_EOS_ID,)
    )
    finished = engine.generate(prompts, samples=1, sampling=sampling, seed=seed)
    right = [
        trajectory.response_ids == tuple(tokens[length:])
        for trajectory, tokens in zip(finished, questions.tokens, strict=True)
    ]
    return float(np.mean(right))


def _write_source(folder: Path, config: ModelConfig) -> None:
    """Everything of a model folder but the weights."""
    tokens = {"pad_token_id": _PAD_ID, "eos_token_id": _EOS_ID}
    write_json(folder / "config.json", config.to_hf() | tokens)
    write_json(folder / "generation_config.json", tokens)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }
    write_json(folder / "tokenizer_config.json", settings)

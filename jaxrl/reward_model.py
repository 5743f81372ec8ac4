"""A reward model: a sequence classifier with one label, computed in JAX where the trainer is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl.checkpoint.hf import check_tokenizer_fits
from jaxrl.checkpoint.hf_classifier import load_classifier, load_trunk_config
from jaxrl.config import MeshConfig, RewardModelConfig
from jaxrl.errors import ConfigError, ConversionError, DataError, RewardError
from jaxrl.models import Model, ModelConfig, score_weight, value_head_apply, weight_table
from jaxrl.prompts import cut, load_tokenizer
from jaxrl.reward_request import Asked, shown
from jaxrl.reward_values import Reward
from jaxrl.rollout.batches import bucket
from jaxrl.sharding import batch_sharding, make_mesh, row_multiple, tree_shardings
from jaxrl.types import Prompt

__all__ = ["RewardModel", "ScoreBatch", "plan_scores", "score_last"]


class RewardModel:
    """One entry of `reward.models`, as a `RewardSource`.

    The score is the classifier's row times the hidden state of the text's last token, whatever
    token that is. transformers finds its place by looking for padding instead, and so stops before
    the end of a text whose last token is the padding token.
    """

    def __init__(self, settings: RewardModelConfig, *, key: str, mesh: Mesh | None = None) -> None:
        """Load it.

        Args:
            settings: The entry.
            key: Its place in the settings, for messages.
            mesh: Devices its weights are spread over like the policy's; None: the default device.

        Raises:
            RewardError: It is no such classifier, tensors are missing or left over, or its
                tokenizer does not fit or has no chat template.
        """
        self._settings, self._mesh = settings, mesh
        where = f"{key}.path={settings.path!r}"
        try:
            config, kind = load_trunk_config(settings.path)
            if kind != "ForSequenceClassification":
                what = "language model" if kind == "ForCausalLM" else "token classifier"
                raise ConversionError(
                    f"it is a {what}; a reward model is a sequence classifier with one "
                    "label (architectures in its config.json: ...ForSequenceClassification)"
                )
            self._tokenizer = load_tokenizer(settings.path)
            check_tokenizer_fits(self._tokenizer, config)
            if settings.chat and not self._tokenizer.chat_template:
                raise DataError(
                    f"its tokenizer has no chat template; set {key}.chat=false for plain text"
                )
            self._params = load_classifier(
                settings.path,
                config,
                kind,
                dtype=settings.dtype,
                shardings=_shardings(config, mesh or make_mesh(MeshConfig(), jax.devices()[:1])),
            )
        except (ConfigError, ConversionError, DataError) as error:
            raise RewardError(f"{where} cannot be used: {error}") from error
        self._key = key
        name = Path(settings.path).resolve().name
        self.parts = [(f"model:{name}", f"reward model {settings.path}", settings.weight)]
        self._score = jax.jit(partial(score_last, Model(config, settings.dtype, remat="none")))

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts without messages if it reads a chat.

        Raises:
            RewardError: Naming the row.
        """
        for prompt in prompts if self._settings.chat else ():
            if not prompt.messages:
                raise RewardError(
                    f"{self.parts[0][1]} reads a chat, but {shown(prompt)} is plain text; set "
                    f"{self._key}.chat=false, or data.chat=true"
                )

    def ask(self, asked: Asked) -> Iterator[list[Reward]]:
        """Scores, float32, one a completion."""
        self.check(asked.prompts)
        texts = [
            self._ids(prompt, completion)
            for prompt, completion in zip(asked.prompts, asked.completions, strict=True)
        ]
        scores = np.zeros(len(texts), np.float32)
        multiple = 1 if self._mesh is None else row_multiple(self._mesh)
        limits = (self._settings.batch_tokens, self._settings.max_tokens)
        for batch in plan_scores([len(ids) for ids in texts], *limits, row_multiple=multiple):
            tokens = np.zeros((batch.rows, batch.columns), np.int32)
            lengths = np.zeros(batch.rows, np.int32)
            for row, index in enumerate(batch.texts):
                lengths[row] = len(texts[index])
                tokens[row, : lengths[row]] = texts[index]
            where = None if self._mesh is None else batch_sharding(self._mesh, leading=0)
            computed = self._score(self._params, *jax.device_put((tokens, lengths), where))
            scores[list(batch.texts)] = np.asarray(computed)[: len(batch.texts)]
        yield [float(score) for score in scores]

    def close(self) -> None:
        """Nothing has been started."""

    def _ids(self, prompt: Prompt, completion: str) -> list[int]:
        """The text as ids of its own tokenizer; of one that is too long, the last."""
        tokenizer, text, special = self._tokenizer, prompt.text + completion, True
        if self._settings.chat:
            chat = [*map(dict, prompt.messages), {"role": "assistant", "content": completion}]
            try:
                text = tokenizer.apply_chat_template(chat, tokenize=False)
            except Exception as error:
                raise RewardError(
                    f"the chat template of {self.parts[0][1]} refuses {shown(prompt)} ({error})"
                ) from error
            special = False  # the template writes its own
        elif tokenizer.bos_token and text.startswith(tokenizer.bos_token):
            special = False
        ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        if not ids:
            raise RewardError(f"{self.parts[0][1]}: there is no text to read, {shown(prompt)}")
        return cut(ids, self._settings.max_tokens, "left")


def score_last(
    model: Model,
    params: Any,
    tokens: Int[Array, "rows time"],
    lengths: Int[Array, " rows"],
) -> Float[Array, " rows"]:
    """The score w · h(last token), float32: w the classifier's row, h after the final norm.

    Args:
        model: The decoder.
        params: From `load_classifier`.
        tokens: A text a row, padded on the right with anything.
        lengths: Tokens of each text; 0 for a row that is not in use, whose score means nothing.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    hidden = model.hidden(params, tokens, positions, segments)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    kernel = params["value_head"]["kernel"]
    head = {"kernel": kernel, "bias": jnp.zeros(1, jnp.float32)}
    return value_head_apply(head, jnp.take_along_axis(hidden, last, axis=1)[:, 0])


class ScoreBatch(NamedTuple):
    """Texts that are computed together; rows beyond them are not in use."""

    texts: tuple[int, ...]
    rows: int
    columns: int


def plan_scores(
    lengths: Sequence[int], batch_tokens: int, max_tokens: int, *, row_multiple: int = 1
) -> list[ScoreBatch]:
    """Batches of texts of similar length, in few shapes, so that a run compiles few programs.

    Columns are the bucket of the longest text (at most max_tokens), rows a power of two times
    `row_multiple`, or as many as fit into batch_tokens.

    >>> plan_scores([5, 100, 7], batch_tokens=128, max_tokens=100)
    [ScoreBatch(texts=(1,), rows=1, columns=100), ScoreBatch(texts=(2, 0), rows=2, columns=16)]
    """
    left = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches = []
    while left:
        columns = min(bucket(lengths[left[0]]), max_tokens)
        most = max(batch_tokens // columns // row_multiple, 1)
        fitting = min(most, -(-len(left) // row_multiple))
        rows = min(1 << (fitting - 1).bit_length(), most) * row_multiple
        batches.append(ScoreBatch(tuple(left[:rows]), rows, columns))
        left = left[rows:]
    return batches


def _shardings(config: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    table = [weight for weight in weight_table(config) if weight.path[0] != "head"]
    table.append(score_weight(config))
    return tree_shardings(mesh, ((w.path, w.full_shape, w.axes) for w in table))

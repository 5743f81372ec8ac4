"""What `convert.py --check` compares: every tensor, and outputs with those of transformers."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.checkpoint.hf_check import differing
from jaxrl.checkpoint.hf_files import TensorSource
from jaxrl.errors import ConversionError
from jaxrl.models import Model, ModelConfig, value_head_apply, weight_table

Params = dict[str, Any]
Outputs = Callable[[Params, ModelConfig, np.ndarray], np.ndarray]
# Largest difference of logits with transformers, as a share of the largest logit. Rounding in
# float32 makes 7e-6 of it on SmolLM2.
TOLERANCE = 1e-4


def compare(what: str, tensors: Sequence[TensorSource], out: Path, dtype: str) -> None:
    """Every tensor with the one that was written, to the bit."""
    lines = differing(tensors, out, dtype)
    if lines:
        shown = "\n  ".join(lines[:20] + [f"and {len(lines) - 20} more"] * (len(lines) > 20))
        raise ConversionError(f"{what} disagree in {len(lines)} tensor(s):\n  {shown}")
    print(f"check: {what} agree: {len(tensors)} tensors, in every bit")


def compare_with_transformers(
    folder: Path, outputs: Outputs, read: Callable[[], Params], config: ModelConfig
) -> None:
    """Outputs of our decoder, with the parameters that `read` gives, and of transformers."""
    if importlib.util.find_spec("torch") is None:
        print("check: torch is not installed, so transformers was not compared")
        return
    size = 4 * sum(math.prod(weight.full_shape) for weight in weight_table(config))
    needed, free = 3 * size, memory_available()
    if needed > free:
        print(
            f"check: transformers was not compared: both models need {needed / 1e9:.1f} GB of "
            f"memory, and {free / 1e9:.1f} GB are available"
        )
        return
    import torch
    import transformers

    tokens = _tokens(config)
    auto: Any = transformers.AutoModelForCausalLM
    if outputs is values:
        auto = transformers.AutoModelForTokenClassification
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    ours = outputs(read(), config, tokens)
    _judge("jaxrl and transformers", outputs.__name__, ours, theirs.reshape(ours.shape))


def memory_available() -> float:
    """Bytes that a new process could have; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return math.inf
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return float(found[0]) * 1024 if found else math.inf


def _judge(what: str, name: str, one: np.ndarray, other: np.ndarray) -> None:
    difference, largest = np.abs(one - other).max(), np.abs(other).max()
    figures = f"largest difference of {name} {difference:.2e}, largest of them {largest:.3g}"
    if not difference <= TOLERANCE * largest:  # NaN is no agreement
        raise ConversionError(f"{what} disagree: {figures}, allowed {TOLERANCE * largest:.2e}")
    print(f"check: {what} agree: {figures}")


def logits(params: Params, config: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """Float32 logits of our decoder, `[batch, time, vocab]`."""
    head = jnp.asarray(Model(config).head(params))
    return np.asarray(_hidden(params, config, tokens) @ head)


def values(params: Params, config: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """Values of the states after the tokens, `[batch, time]`."""
    return np.asarray(value_head_apply(params["value_head"], _hidden(params, config, tokens)))


def _hidden(params: Params, config: ModelConfig, tokens: np.ndarray) -> jax.Array:
    model = Model(config, dtype="float32", remat="none")
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return jax.jit(model.hidden)(params, tokens, positions, np.ones_like(tokens))


def _tokens(config: ModelConfig) -> np.ndarray:
    random = np.random.default_rng(0)
    return random.integers(0, config.vocab_size, (2, 16), dtype=np.int32)

"""Converts between Hugging Face folders and jaxrl's checkpoints.

    python scripts/convert.py hf-to-jaxrl models/SmolLM2-135M-Instruct runs/start --check
    python scripts/convert.py jaxrl-to-hf runs/quickstart runs/quickstart/served --dtype bfloat16
    python scripts/convert.py jaxrl-to-hf runs/quickstart runs/quickstart/critic --critic --check

A checkpoint is named by a run folder, its checkpoints folder, or one checkpoint in there. What
hf-to-jaxrl writes holds the policy alone: a training run starts from the Hugging Face folder.
With `--critic` it is the critic that is written, as a token classifier whose one logit at a token
is the value of the state after it; `critic.path` takes such a folder (see `critic.keep_head`).
`--check` compares logits (or values) before and after, and with transformers where torch is
installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.checkpoint.hf import load_hf_config, load_params
from jaxrl.checkpoint.hf_classifier import export_critic, load_classifier
from jaxrl.checkpoint.hf_export import export_hf
from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.errors import CheckpointError, ConversionError, JaxrlError
from jaxrl.models import Model, ModelConfig, value_head_apply
from jaxrl.types import TrainState

Params = dict[str, Any]
Outputs = Callable[[Params, ModelConfig, np.ndarray], np.ndarray]
# Largest difference of logits with transformers, as a share of the largest logit. Rounding in
# float32 makes 7e-6 of it on SmolLM2.
TOLERANCE = 1e-4


def hf_to_jaxrl(folder: Path, out: Path, *, check: bool) -> None:
    """Writes the model in `folder` as the checkpoint of step 0 in the new folder `out`."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConversionError(f"{out} exists and is not empty; give a new folder")
    config = ModelConfig.from_hf(load_hf_config(folder))
    params = load_params(folder, config)
    nothing = np.zeros((), np.int32)
    state = TrainState(
        policy_params=params,
        value_params={},
        policy_opt={},
        value_opt={},
        updates=nothing,
        iteration=nothing,
        kl_coef=np.zeros((), np.float32),
        reward_moments=np.zeros(3, np.float32),
        skipped=nothing,
        skipped_in_a_row=nothing,
    )
    store = CheckpointStore(out, keep=1)
    try:
        store.save(0, state, {"config": {"model": {"path": str(folder.resolve())}}})
        store.wait()
        if check:
            restored, _ = store.restore_policy(0)
            _compare("source and checkpoint", logits, params, restored, config)
            _compare_with_transformers(folder, logits, restored, config)
    finally:
        store.close()
    print(f"{out}: checkpoint of step 0, the policy of {folder}")


def jaxrl_to_hf(
    checkpoint: Path,
    out: Path,
    *,
    step: int | None,
    source: Path | None,
    critic: bool,
    dtype: str,
    max_shard_bytes: int,
    check: bool,
) -> None:
    """Writes the policy or the critic of a checkpoint as a Hugging Face folder."""
    store, step = open_checkpoint(checkpoint, step)
    try:
        params, host = _critic_params(store, step) if critic else store.restore_policy(step)
    finally:
        store.close()
    source = source or _model_folder(host, store.folder)
    config = ModelConfig.from_hf(load_hf_config(source))
    how: dict[str, Any] = dict(source=source, dtype=dtype, max_shard_bytes=max_shard_bytes)
    if critic:
        export_critic(out, params, params["value_head"], config, **how)
    else:
        export_hf(out, params, config, **how)
    if check:
        rounded = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype).astype(jnp.float32), params)
        if critic:
            outputs, exported = values, load_classifier(out, config, "ForTokenClassification")
        else:
            outputs, exported = logits, load_params(out, config)
        _compare(f"checkpoint in {dtype} and export", outputs, rounded, exported, config)
        _compare_with_transformers(out, outputs, exported, config)
    what = "critic" if critic else "policy"
    print(f"{out}: Hugging Face folder in {dtype}, the {what} of step {step} in {store.folder}")


def _critic_params(store: CheckpointStore, step: int) -> tuple[Params, dict[str, Any]]:
    """The critic's trunk, which for a head is the policy's, with its "value_head"."""
    params, host = store.restore_critic(step)
    if not params:
        raise ConversionError(f"step {step} in {store.folder} has no critic; leave out --critic")
    trunk = params["trunk"] if "trunk" in params else store.restore_policy(step)[0]
    return {**trunk, "value_head": params["value_head"]}, host


def open_checkpoint(path: Path, step: int | None) -> tuple[CheckpointStore, int]:
    """The store that `path` means, and the step: the one asked for or named, else the newest.

    Raises:
        CheckpointError: If there is no whole checkpoint; says which are damaged.
    """
    if (path / "manifest.json").is_file() and step is None:
        path, step = path.parent, int(path.name.split(".")[0])
    elif (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; give a run folder or a checkpoint in it")
    store = CheckpointStore(path, keep=1)
    if step is None:
        step = store.latest()
    if step is None:
        store.close()
        damaged = "".join(f"\n  {one}: {reason}" for one, reason in store.damaged().items())
        raise CheckpointError(
            f"{path} holds no whole checkpoint; give a run folder or a checkpoint in it{damaged}"
        )
    return store, step


def _model_folder(host: dict[str, Any], folder: Path) -> Path:
    path = host.get("config", {}).get("model", {}).get("path")
    if path is None or not Path(path).is_dir():
        raise ConversionError(
            f"the model folder that {folder} started from, {path}, is not there; its config and "
            "tokenizer are needed: give that folder with --source"
        )
    return Path(path)


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


def _compare(what: str, outputs: Outputs, one: Params, other: Params, config: ModelConfig) -> None:
    """Equal parameters through one program must give equal outputs, to the bit."""
    tokens = _tokens(config)
    name = outputs.__name__
    _judge(what, name, outputs(one, config, tokens), outputs(other, config, tokens), 0.0)


def _compare_with_transformers(
    folder: Path, outputs: Outputs, params: Params, config: ModelConfig
) -> None:
    if importlib.util.find_spec("torch") is None:
        print("check: torch is not installed, so transformers was not compared")
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
    ours = outputs(params, config, tokens)
    name = outputs.__name__
    _judge("jaxrl and transformers", name, ours, theirs.reshape(ours.shape), TOLERANCE)


def _judge(what: str, name: str, one: np.ndarray, other: np.ndarray, tolerance: float) -> None:
    difference, largest = np.abs(one - other).max(), np.abs(other).max()
    figures = f"largest difference of {name} {difference:.2e}, largest of them {largest:.3g}"
    if not difference <= tolerance * largest:  # NaN is no agreement
        raise ConversionError(f"{what} disagree: {figures}, allowed {tolerance * largest:.2e}")
    print(f"check: {what} agree: {figures}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    inward = commands.add_parser("hf-to-jaxrl", help="Hugging Face folder to checkpoint")
    inward.add_argument("folder", type=Path, help="Hugging Face model folder")
    outward = commands.add_parser("jaxrl-to-hf", help="checkpoint to Hugging Face folder")
    outward.add_argument("checkpoint", type=Path, help="run folder, or a checkpoint in it")
    outward.add_argument("--step", type=int, help="which checkpoint (the newest)")
    outward.add_argument("--source", type=Path, help="folder with the config and the tokenizer")
    outward.add_argument("--critic", action="store_true", help="the critic, not the policy")
    outward.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    outward.add_argument("--max-shard-bytes", type=int, default=5_000_000_000)
    for command in (inward, outward):
        command.add_argument("out", type=Path, help="folder to write")
        command.add_argument(
            "--check", action="store_true", help="compare logits or values afterwards"
        )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = vars(parse(argv))
    convert = {"hf-to-jaxrl": hf_to_jaxrl, "jaxrl-to-hf": jaxrl_to_hf}[arguments.pop("command")]
    try:
        convert(**arguments)
    except JaxrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

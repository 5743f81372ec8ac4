"""Converts between Hugging Face folders and jaxrl's checkpoints.

    python scripts/convert.py hf-to-jaxrl models/SmolLM2-135M-Instruct runs/start --check
    python scripts/convert.py jaxrl-to-hf runs/quickstart runs/quickstart/served --dtype bfloat16
    python scripts/convert.py jaxrl-to-hf runs/quickstart runs/quickstart/critic --critic --check
    python scripts/convert.py jaxrl-to-hf runs/quickstart runs/head.safetensors --critic-head

A checkpoint is named by a run folder, its checkpoints folder, or one checkpoint in there; one
process or many may have written it. What goes out is read and written a piece at a time, so that
the model need not fit into memory. What hf-to-jaxrl writes holds the policy alone, for which it
needs memory for two copies in float32; a training run starts from the Hugging Face folder itself.

With `--critic` it is the critic that is written, as a token classifier whose one logit at a token
is the value of the state after it; `critic.path` takes such a folder (see `critic.keep_head`).
`--critic-head` writes only its last layer, as the file `OUT`, under the same names.

`--check` compares every tensor before and after, to the bit; and logits (or values) with those of
transformers, where torch is installed and there is memory for both models.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from convert_check import compare, compare_with_transformers, logits, values

from jaxrl.checkpoint.hf import load_hf_config, load_params
from jaxrl.checkpoint.hf_classifier import (
    critic_tensors,
    export_critic,
    head_tensors,
    load_classifier,
)
from jaxrl.checkpoint.hf_export import export_hf, hf_tensors
from jaxrl.checkpoint.hf_files import write_file
from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.config import MeshConfig
from jaxrl.errors import CheckpointError, ConversionError, JaxrlError
from jaxrl.models import ModelConfig, weight_table
from jaxrl.sharding import make_mesh, tree_shardings
from jaxrl.types import TrainState


def hf_to_jaxrl(folder: Path, out: Path, *, check: bool) -> None:
    """Writes the model in `folder` as the checkpoint of step 0 in the new folder `out`."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConversionError(f"{out} exists and is not empty; give a new folder")
    config = ModelConfig.from_hf(load_hf_config(folder))
    # Arrays of JAX's on the CPU: of numpy's, saving makes two copies, of these one.
    mesh = make_mesh(MeshConfig(), jax.devices("cpu")[:1])
    table = ((w.path, w.full_shape, w.axes) for w in weight_table(config))
    state = policy_alone(load_params(folder, config, shardings=tree_shardings(mesh, table)))
    store = CheckpointStore(out, keep=1)
    try:
        store.save(0, state, {"config": {"model": {"path": str(folder.resolve())}}})
        store.wait()
        del state
        if check:
            stored, _, _ = store.stored(0)
            compare("source and checkpoint", hf_tensors(stored, config), folder, "float32")
            compare_with_transformers(folder, logits, lambda: store.restore_policy(0)[0], config)
    finally:
        store.close()
    print(f"{out}: checkpoint of step 0, the policy of {folder}")


def policy_alone(params: dict[str, Any]) -> TrainState:
    """A state from which nothing can go on but an export."""
    nothing = np.zeros((), np.int32)
    return TrainState(
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


def jaxrl_to_hf(
    checkpoint: Path,
    out: Path,
    *,
    step: str | None,
    source: Path | None,
    critic: bool,
    critic_head: bool,
    dtype: str,
    max_shard_bytes: int,
    check: bool,
) -> None:
    """Writes the policy, the critic or its head of a checkpoint in Hugging Face's layout."""
    store, found = open_checkpoint(checkpoint, step)
    try:
        policy, value, host = store.stored(found)
        if (critic or critic_head) and not value:
            raise ConversionError(
                f"step {found} in {store.folder} has no critic; leave out --critic(-head)"
            )
        source = source or _model_folder(host, store.folder)
        config = ModelConfig.from_hf(load_hf_config(source))
        how: dict[str, Any] = dict(source=source, dtype=dtype, max_shard_bytes=max_shard_bytes)
        if critic_head:
            what, tensors = "critic's head", head_tensors(value["value_head"], config)
            write_file(out, tensors, dtype)
        elif critic:
            trunk = value.get("trunk", policy)
            what, tensors = "critic", critic_tensors(trunk, value["value_head"], config)
            export_critic(out, trunk, value["value_head"], config, **how)
        else:
            what, tensors = "policy", hf_tensors(policy, config)
            export_hf(out, policy, config, **how)
        if check:
            compare(f"checkpoint in {dtype} and export", tensors, out, dtype)
        if check and critic:
            read = partial(load_classifier, out, config, "ForTokenClassification")
            compare_with_transformers(out, values, read, config)
        elif check and not critic_head:
            compare_with_transformers(out, logits, partial(load_params, out, config), config)
    finally:
        store.close()
    kind = "file" if critic_head else "Hugging Face folder"
    print(f"{out}: {kind} in {dtype}, the {what} of step {found} in {store.folder}")


def open_checkpoint(path: Path, step: str | None) -> tuple[CheckpointStore, int]:
    """The store that `path` means, and the step: the one asked for or named, else the newest.

    Raises:
        CheckpointError: If there is no whole checkpoint; says which are damaged.
    """
    if (path / "manifest.json").is_file() and step is None:
        path, step = path.parent, path.name.split(".")[0]
    elif (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; give a run folder or a checkpoint in it")
    store = CheckpointStore(path, keep=1)
    try:
        return store, store.find(step or "latest")
    except CheckpointError:
        store.close()
        raise


def _model_folder(host: dict[str, Any], folder: Path) -> Path:
    path = host.get("config", {}).get("model", {}).get("path")
    if path is None or not Path(path).is_dir():
        raise ConversionError(
            f"the model folder that {folder} started from, {path}, is not there; its config and "
            "tokenizer are needed: give that folder with --source"
        )
    return Path(path)


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
    outward.add_argument("--step", help="latest, best or a number (latest)")
    outward.add_argument("--source", type=Path, help="folder with the config and the tokenizer")
    which = outward.add_mutually_exclusive_group()
    which.add_argument("--critic", action="store_true", help="the critic, not the policy")
    which.add_argument("--critic-head", action="store_true", help="its head alone, as one file")
    outward.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    outward.add_argument("--max-shard-bytes", type=int, default=5_000_000_000)
    for command in (inward, outward):
        command.add_argument("out", type=Path, help="folder (or file) to write")
        command.add_argument(
            "--check", action="store_true", help="compare all tensors afterwards, and outputs"
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

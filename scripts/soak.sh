#!/usr/bin/env bash
# Kills a small training run with SIGKILL, 50 times at random moments, and sees whether it ends as
# one that was never stopped: parameters, optimizer states and metrics to the bit.
#
#     scripts/soak.sh                            # 50 kills; writes runs/soak/soak.md
#     scripts/soak.sh --kills 10 --seed 3        # fewer, at other moments
#     scripts/soak.sh --out runs/other           # another place
#
# Exit status 0 only if all is equal. About 15 minutes on two CPU cores, most of it Python starting.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "${JAXRL_VENV:-.venv}/bin/python" scripts/soak.py "$@"

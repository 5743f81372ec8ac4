#!/usr/bin/env bash
# Head, policy step and sampler of a 0.6B-shape Qwen3 on one GPU, against its own matrix peak.
#
#     scripts/bench_gpu.sh            # at most eight minutes
#     scripts/bench_gpu.sh --small    # tiny sizes, on a CPU too
#
# Runs in $JAXRL_VENV or .venv, which must have JAX for the device (pip install -e .[cuda]).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec timeout 480 "${JAXRL_VENV:-.venv}/bin/python" scripts/bench_gpu.py "$@"

#!/usr/bin/env bash
# Installs what the tests need, then runs lint, format check, type check and the whole suite.
#
#     scripts/test.sh                    # everything, as continuous integration does
#     scripts/test.sh tests/test_x.py    # the checks, and of the suite only what these arguments select
#
# The first run downloads packages and SmolLM2-135M (93 MB); later ones work offline. JAXRL_VENV names
# another place than .venv, JAXRL_SGLANG_VENV and JAXRL_ROUTER_VENV other places than .venv-sglang
# (2.6 GB) and .venv-sglang-router, JAXRL_PLAN_VENV one than .venv-plan (2.6 GB, 90 seconds);
# JAXRL_TEST_WORKERS the processes the suite runs in (2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step() { echo "== $* (${SECONDS} s)"; }

# Four environments, made side by side: an installation mostly waits, and runs on one core.
step environments
scripts/serve_sglang_cpu.sh --install & server=$!
{ scripts/make_env.sh plan && scripts/serve_sglang_cpu.sh --install-router; } & others=$!
trap 'kill "$server" "$others" 2>/dev/null || true' EXIT
scripts/make_env.sh dev
venv="${JAXRL_VENV:-.venv}"
if ! "$venv/bin/python" -c 'import torch; assert torch.ones(2).sum().item() == 2.0'; then
    echo "error: torch, the reference in the tests, does not run here; reinstall it into $venv" >&2
    exit 1
fi
wait "$server"
wait "$others"

step model
"$venv/bin/python" scripts/get_smollm2.py

step lint
"$venv/bin/python" -m ruff check .
step format
"$venv/bin/python" -m ruff format --check .
step types
"$venv/bin/python" -m pyright --pythonpath "$venv/bin/python"

step tests
# One thread a process: more of them only wait for each other. Nothing may reach for the network.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export XLA_FLAGS="${XLA_FLAGS:---xla_cpu_multi_thread_eigen=false}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
# The same small programs are compiled by many tests: each once. A fresh folder, so nothing old counts.
JAX_COMPILATION_CACHE_DIR="$(mktemp -d)"
trap 'rm -rf "$JAX_COMPILATION_CACHE_DIR"' EXIT
export JAX_COMPILATION_CACHE_DIR JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
# A worker that crashes ends the suite there: with a new one in its place, xdist can wait for ever.
"$venv/bin/python" -m pytest --quiet --numprocesses "${JAXRL_TEST_WORKERS:-2}" --dist loadfile \
    --max-worker-restart 0 \
    --durations 10 --durations-min 10 "$@"

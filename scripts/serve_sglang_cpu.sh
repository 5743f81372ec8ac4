#!/usr/bin/env bash
# A real SGLang server on a machine without a GPU, and the router for several of them.
#
#     scripts/serve_sglang_cpu.sh MODEL_FOLDER [--port 30000] [flags of sglang.launch_server]
#     scripts/serve_sglang_cpu.sh --router URL... [--port 30000] [flags of sglang_router]
#     scripts/serve_sglang_cpu.sh --install           # only make the server's environment
#     scripts/serve_sglang_cpu.sh --install-router    # only make the router's
#
# The first call makes .venv-sglang (or $JAXRL_SGLANG_VENV; the router's .venv-sglang-router or
# $JAXRL_ROUTER_VENV), apart from jaxrl's own, in the versions of scripts/sglang_cpu/. A flag given
# here replaces the one set below. Token ids go in and come out; with --tokenizer-path MODEL_FOLDER
# the server also takes and gives text. It is meant for tests and tiny models: float32, plain torch,
# on OMP_NUM_THREADS cores (1). A traceback about freeze_gc in its log is harmless.
#
# JAXRL_SGLANG_PYTHON names the interpreter to make environments with; pip's own settings,
# PIP_INDEX_URL and the like, apply.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
here="$root/scripts"
server_venv="${JAXRL_SGLANG_VENV:-$root/.venv-sglang}"
router_venv="${JAXRL_ROUTER_VENV:-$root/.venv-sglang-router}"

fail() { echo "error: $*" >&2; exit 1; }

find_python() {
    local name
    for name in ${JAXRL_SGLANG_PYTHON:-} python3.11 python3.12 python3.13 python3; do
        if command -v "$name" >/dev/null && "$name" -c \
            'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    fail "SGLang needs Python 3.11 (3.12 and 3.13 may work too); install it with its venv module," \
        "or name it in JAXRL_SGLANG_PYTHON"
}

# install VENV NAME SIZE REQUIREMENTS CHECK: nothing to do if it was done for these requirements.
install() {
    local venv="$1" name="$2" size="$3" requirements="$here/sglang_cpu/$4" check="$5" python stamp
    mkdir -p "$venv"
    exec 9>"$venv/jaxrl.lock"
    if command -v flock >/dev/null; then flock 9; fi # several servers may start at once
    stamp="$(cksum <"$requirements") $([[ ! -x "$venv/bin/python" ]] || "$venv/bin/python" -VV 2>&1)"
    if [[ ! -f "$venv/jaxrl.stamp" || "$(cat "$venv/jaxrl.stamp")" != "$stamp" ]]; then
        echo "installing $name into $venv, $size" >&2
        rm -f "$venv/jaxrl.stamp"
        if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then # not there, or left half-made
            python="$(find_python)"
            "$python" -m venv "$venv" || fail "could not make $venv; Python's venv module is missing" \
                "or incomplete (on Debian and Ubuntu: apt install python3-venv)"
        fi
        "$venv/bin/python" -m pip install -qq --no-deps --requirement "$requirements"
        "$check" "$venv"
        echo "$(cksum <"$requirements") $("$venv/bin/python" -VV 2>&1)" >"$venv/jaxrl.stamp"
    fi
    exec 9>&- # or the server would hold the lock
}

check_server() {
    "$1/bin/python" -c 'import torch; assert torch.ones(2).sum().item() == 2.0' \
        || fail "the torch in $1 does not run here: most likely it is the build for CUDA. Let pip" \
            "find PyTorch's builds for CPUs (pytorch.org, \"Get started\", names their index) by" \
            "setting PIP_EXTRA_INDEX_URL to it, remove $1, and try again"
    "$1/bin/python" "$here/sglang_cpu/serve.py" --help >/dev/null \
        || fail "SGLang was installed into $1 but does not run here; see above"
}

check_router() {
    "$1/bin/python" -m sglang_router.launch_router --help >/dev/null \
        || fail "sglang-router was installed into $1 but does not run here; see above"
}

install_server() {
    install "$server_venv" SGLang "about 2 minutes, 2.6 GB" requirements.txt check_server
}

install_router() {
    install "$router_venv" sglang-router "half a minute, 150 MB" requirements-router.txt check_router
}

serve() {
    local model="$1" text=--skip-tokenizer-init flag
    shift
    [[ -f "$model/config.json" ]] || fail "$model is no model folder: it has no config.json"
    for flag in "$@"; do
        if [[ "$flag" == --tokenizer-path* ]]; then text=; fi
    done
    install_server
    export CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
    export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    # Without --sleep-on-idle an idle server takes a whole core. The number of tokens held at once
    # bounds the memory of the key-value cache.
    exec "$server_venv/bin/python" "$here/sglang_cpu/serve.py" \
        --model-path "$model" --host 127.0.0.1 --port 30000 --device cpu --dtype float32 \
        --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule \
        --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled \
        --sleep-on-idle --skip-server-warmup --max-running-requests 32 --max-total-tokens 16384 \
        $text "$@"
}

route() {
    local workers=()
    while [[ "${1:-}" == http* ]]; do workers+=("$1"); shift; done
    [[ ${#workers[@]} -gt 0 ]] || fail "--router needs the servers' URLs: --router http://HOST:PORT..."
    install_router
    exec "$router_venv/bin/python" -m sglang_router.launch_router \
        --host 127.0.0.1 --port 30000 --worker-urls "${workers[@]}" "$@"
}

case "${1:-}" in
    --install) install_server ;;
    --install-router) install_router ;;
    --router) shift; route "$@" ;;
    "" | -*) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
    *) serve "$@" ;;
esac

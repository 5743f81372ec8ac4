#!/usr/bin/env bash
# Makes the virtual environment that the other scripts use, and installs what changed, if anything did.
#
#     scripts/make_env.sh run    # jaxrl and what it needs to train, in the versions of constraints.txt
#     scripts/make_env.sh dev    # and what the tests need, in the versions of constraints-dev.txt
#     scripts/make_env.sh plan   # jaxrl and the compilers for GPUs and TPUs, in an environment of their own
#
# JAXRL_VENV names another place than .venv, JAXRL_PLAN_VENV another than .venv-plan, JAXRL_PYTHON the
# interpreter to make it with, and JAXRL_CONSTRAINTS another constraints file (an empty one takes the newest versions). pip's own
# settings, PIP_INDEX_URL and the like, apply.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

what="${1:-}"
venv="${JAXRL_VENV:-.venv}"
case "$what" in
    run) spec="." constraints="${JAXRL_CONSTRAINTS:-constraints.txt}" ;;
    dev) spec=".[dev]" constraints="${JAXRL_CONSTRAINTS:-constraints-dev.txt}" ;;
    plan)
        spec=".[plan-cuda,plan-tpu]" constraints="${JAXRL_CONSTRAINTS:-constraints-plan.txt}"
        venv="${JAXRL_PLAN_VENV:-.venv-plan}"
        ;;
    *) echo "usage: scripts/make_env.sh run|dev|plan" >&2; exit 2 ;;
esac

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local name
    for name in ${JAXRL_PYTHON:-} python3.11 python3 python3.12 python3.13 python3.14 python; do
        if command -v "$name" >/dev/null && new_enough "$name"; then
            echo "$name"
            return
        fi
    done
    echo "error: no Python 3.11 or newer found; install one with its venv module" \
        "(on Debian and Ubuntu: apt install python3 python3-venv)" >&2
    return 1
}

if [[ -x "$venv/bin/python" ]] && ! new_enough "$venv/bin/python"; then
    echo "error: $venv holds a Python older than 3.11 or a broken one; remove it, or set JAXRL_VENV" >&2
    exit 1
fi
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then # not there, or left half-made
    python="$(find_python)"
    echo "making $venv with $("$python" --version)"
    if ! "$python" -m venv "$venv"; then
        echo "error: could not make $venv; Python's venv module is missing or incomplete" \
            "(on Debian and Ubuntu: apt install python3-venv)" >&2
        exit 1
    fi
fi

# All that an installation follows from, the folder included since jaxrl is installed in place.
fingerprint="$({ pwd; cat pyproject.toml constraints*.txt; \
    echo "${JAXRL_CONSTRAINTS:-}"; "$venv/bin/python" -VV; } | "$venv/bin/python" -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
for done in "$what" dev; do # dev holds all that run holds
    stamp="$venv/jaxrl-$done.stamp"
    if [[ -f "$stamp" && "$(cat "$stamp")" == "$fingerprint" ]]; then
        exit 0
    fi
done

if [[ "$what" == dev ]] && ! "$venv/bin/python" -c 'import pycosat' 2>/dev/null \
    && ! command -v "${CC:-cc}" >/dev/null && ! command -v gcc >/dev/null; then
    echo "error: the tests use reasoning_gym, whose dependency pycosat is built with a C compiler;" \
        "install one (on Debian and Ubuntu: apt install gcc python3-dev)" >&2
    exit 1
fi

echo "installing jaxrl ($what) into $venv"
rm -f "$venv"/jaxrl-*.stamp
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$constraints" --editable "$spec"
echo "$fingerprint" > "$venv/jaxrl-$what.stamp"

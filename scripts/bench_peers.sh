#!/usr/bin/env bash
# Installs the libraries that jaxrl is compared with, measures them beside it, and prints the table.
#
#     scripts/bench_peers.sh                           # everything; about two hours on two cores
#     scripts/bench_peers.sh --only policy_step gae    # some rows; any option of bench_table.py
#     scripts/bench_peers.sh --install                 # the environments alone
#
# Each peer has an environment of its own, .venv-peers/NAME, in the versions of scripts/peers/NAME.txt;
# one that is there and unchanged is left alone. They need Python 3.11, and tokamax 3.12, found on the
# PATH or among pyenv's, or named by PYTHON311 and PYTHON312. A peer whose Python is missing is left
# out. pip's own settings, PIP_INDEX_URL and the like, apply. JAXRL_PEERS names another folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export JAXRL_PEERS="${JAXRL_PEERS:-.venv-peers}"

find_python() { # VERSION
    local named="PYTHON${1/./}" candidate
    for candidate in "${!named:-}" "python$1" "$HOME/.pyenv/versions/$1".*/bin/python; do
        # Asked, since a pyenv shim may be there without its version.
        if [[ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" == "$1" ]]; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

install_peer() { # NAME PYTHON-VERSION
    local venv="$JAXRL_PEERS/$1" pins="scripts/peers/$1.txt" python
    if cmp --silent "$pins" "$venv/installed.txt"; then
        return
    fi
    if ! python="$(find_python "$2")"; then
        echo "left out: $1 needs Python $2, which was not found; PYTHON${2/./} can name it" >&2
        return
    fi
    echo "installing $1 into $venv" >&2
    rm -f "$venv/installed.txt"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$pins"
    cp "$pins" "$venv/installed.txt" # last, so that a broken installation is begun again
}

scripts/make_env.sh run
install_peer tunix 3.11
install_peer tokamax 3.12
install_peer trl 3.11
install_peer trl-chunked 3.11
if [[ "${1:-}" == --install ]]; then
    exit
fi
exec "${JAXRL_VENV:-.venv}/bin/python" scripts/bench_table.py "$@"

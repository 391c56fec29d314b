#!/bin/sh
# Makes .venv ready and prints nothing when it already is. Called by make before every target that needs it.
#
# The network is used only when something has changed since the last time: the dependencies in pyproject.toml,
# the folder (a venv can't be moved), or the interpreter. PYTHON=... chooses the interpreter.
set -eu
cd "$(dirname "$0")/.."

fail() { printf 'make: %s\n' "$1" >&2; exit 1; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null 2>&1 || fail "there is no '$PYTHON' to run (PYTHON=$PYTHON)"
        is_new_enough "$PYTHON" || fail "'$PYTHON' is older than Python 3.11; name a newer one: make PYTHON=python3.12"
        printf '%s' "$PYTHON"
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if is_new_enough "$candidate"; then printf '%s' "$candidate"; return; fi
    done
    fail "needs Python 3.11 or newer (Debian, Ubuntu: apt-get install python3 python3-venv), or name one: make PYTHON=/path/to/python3"
}

python=$(find_python)
stamp=.venv/.me2b-installed
wanted="$("$python" -c 'import sys; print(sys.version, sys.base_prefix)') in $(pwd) with $(cksum < pyproject.toml)"
[ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && exit 0

"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python lacks its venv module (Debian, Ubuntu: apt-get install python3-venv)"
echo "Setting up .venv with $("$python" --version) (once; needs a package index)"
rm -f "$stamp"
"$python" -m venv --clear .venv || fail "could not make .venv with $python"
.venv/bin/python -m pip install -qq --disable-pip-version-check --editable '.[dev]' ||
    fail "pip could not install the dependencies (see above); run it again once the package index is reachable"
printf '%s\n' "$wanted" > "$stamp"

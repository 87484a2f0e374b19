# Shared by the scripts of this folder, which source it. It moves to the repository's root.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
trap 'exit 130' INT TERM HUP

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { say "$*"; exit 1; }

# Prints the interpreter to make environments with: $PYTHON, else python3.11 (which the
# vLLM list is pinned for), else a python3 that is new enough.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        "$candidate" -c 'import ensurepip, venv' 2>/dev/null ||
            die "$candidate has no venv or ensurepip module; on Debian: apt-get install python3-venv"
        command -v "$candidate"
        return
    done
    die "needs Python 3.11 or newer; set PYTHON to its path"
}

# Waits until no other make builds this environment. The lock goes with the process.
lock_venv() {
    command -v flock >/dev/null || die "needs flock (Debian: apt-get install util-linux)"
    exec 9>"$1.lock"
    flock --nonblock 9 || { say "another process is building $1, waiting"; flock 9; }
}

# Hash of what an environment is made from. Environments do not move, so the place counts too.
content_hash() { { pwd -P; cat "$@"; } | sha256sum | cut -d' ' -f1; }

# up_to_date VENV STEP HASH: was this step finished from this very content?
up_to_date() { [ -x "$1/bin/python" ] && [ "$(cat "$1/.kvpool-$2" 2>/dev/null)" = "$3" ]; }

# Says every 10 s how large an environment has become, until it is killed or the script has ended.
say_size() {
    while read -rt 10 <> <(:) || kill -0 $$ 2>/dev/null; do
        say "$1 has $(du -sm "$1" | cut -f1) MB so far"
    done
}

# install VENV STEP HASH PIP-ARGUMENTS: the step's stamp is there only once it is finished.
install() {
    local venv=$1 step=$2 hash=$3 saying status=0
    shift 3
    rm -f "$venv/.kvpool-$step"
    touch "$venv/.kvpool-unfinished"
    say_size "$venv" 9>&- &
    saying=$!
    "$venv/bin/python" -m pip install -qq "$@" || status=$?
    kill "$saying"
    wait "$saying" 2>/dev/null || true
    if [ "$status" != 0 ]; then
        rm -f "$venv/.kvpool-unfinished"
        return 1
    fi
    [ -z "$hash" ] || printf '%s\n' "$hash" >"$venv/.kvpool-$step"
    rm -f "$venv/.kvpool-unfinished"
}

# make_venv VENV: makes it if absent, and anew where an installation was killed halfway.
make_venv() {
    local python
    [ -e "$1/.kvpool-unfinished" ] || ! "$1/bin/python" -m pip --version >/dev/null 2>&1 || return 0
    python=$(find_python)
    say "making $1 with $python"
    rm -rf "$1"
    "$python" -m venv "$1"
}

# Sourced by the scripts beside it: the virtual environment in .venv, and headings that say how long
# things took. PIP_* variables hold; PYTHON names the interpreter to make .venv with.

python=.venv/bin/python

# heading TEXT: announce a phase, after saying how long the one before it took.
heading() {
    finish_phase
    printf '\n== %s\n' "$1"
    phase_began=$SECONDS
}

finish_phase() {
    if [ -n "${phase_began:-}" ]; then
        printf -- '-- took %d:%02d\n' $(((SECONDS - phase_began) / 60)) $(((SECONDS - phase_began) % 60))
    fi
    phase_began=
}

# prepare_environment [EXTRAS]: make .venv when missing, install this checkout with the extras into
# it unless that has been done since setup.cfg last changed.
prepare_environment() {
    local extras=${1:-} installed=.venv/installed${1:+-$1}.cfg
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        make_environment
    fi
    if cmp -s setup.cfg "$installed"; then
        echo "Environment: .venv is up to date"
        return
    fi
    # Twice quiet: errors only; what pip warns of is about the machine, not about this project.
    heading "Install clover-jax${extras:+ with $extras} into .venv (some minutes the first time)"
    PIP_DISABLE_PIP_VERSION_CHECK=${PIP_DISABLE_PIP_VERSION_CHECK:-1} \
        "$python" -m pip install --quiet --quiet --editable ".${extras:+[$extras]}"
    cp setup.cfg "$installed"
}

make_environment() {
    local interpreter=${PYTHON:-python3}
    if ! command -v "$interpreter" >/dev/null; then
        echo "$interpreter is missing: install Python 3.11 or newer, or name one:" \
            "PYTHON=/path/to/python3.12 $0" >&2
        exit 2
    fi
    if ! "$interpreter" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "Python 3.11 or newer is needed, but $interpreter is $("$interpreter" --version);" \
            "name another one: PYTHON=/path/to/python3.12 $0" >&2
        exit 2
    fi
    heading "Make .venv with $("$interpreter" --version)"
    "$interpreter" -m venv --clear .venv
}

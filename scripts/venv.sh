# Sourced by the other scripts. `install_venv EXTRAS` makes .venv and installs this project with the tested versions.

# Does nothing when neither pyproject.toml nor constraints.txt has changed since the last time.
install_venv() {
    local target=".${1:+[$1]}" stamp
    stamp=".venv/installed-${1:-base}-$(cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)"
    if [ -e "$stamp" ]; then return; fi
    if ! "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "${PYTHON:-python3} is older than 3.10: set PYTHON to a newer one." >&2
        return 1
    fi
    [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
    echo "Installing $target into .venv (a minute or two after the downloads)"
    .venv/bin/python -m pip install --quiet --upgrade pip
    .venv/bin/python -m pip install --quiet --prefer-binary --editable "$target" --constraint constraints.txt
    touch "$stamp"
}

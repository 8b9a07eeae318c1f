# Sourced by the scripts here and below. shellcheck shell=bash
# The files that name what the three distributions need.
# shellcheck disable=SC2034  # for who sources this
PROJECTS=(pyproject.toml engine_patch/pyproject.toml bench/pyproject.toml)

say() { printf '── %s\n' "$*" >&2; }

die() {
    printf 'error: %s\n' "$1" >&2
    shift
    printf '       %s\n' "$@" >&2
    exit 1
}

# Prints pip options for the PyTorch build that was asked for.
torch_options() {
    [ -z "${TORCH_INDEX-}" ] || printf -- '--extra-index-url\n%s\n' "$TORCH_INDEX"
}

# as_root CMD…: run a command as root, or fail at once where that would need a password.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        sudo -n "$@"
    else
        return 1
    fi
}

# Sourced by setup.sh and tools.sh. shellcheck shell=bash
say() { printf '── %s\n' "$*" >&2; }

die() {
    printf 'error: %s\n' "$1" >&2
    shift
    printf '       %s\n' "$@" >&2
    exit 1
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

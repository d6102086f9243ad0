#!/usr/bin/env bash
# Finds or makes a Python with CuPy, NumPy and gguf, and runs gpu_check.py with the flags given. Works without a network
# where the packages are there, or lie as wheels in the folder WHEELS:
#     pip download --only-binary=:all: -d wheels 'cupy-cuda13x[ctk]>=14' gguf     # where there is a network
#     WHEELS=wheels bash benchmarks/gpu_check.sh
# PYTHON names the Python to be used. Nothing is installed into it: what it lacks goes to a folder of its own.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extra=$(mktemp -d)
trap 'rm -rf "$extra"' EXIT
export PYTHONPATH="$extra:$root/src${PYTHONPATH:+:$PYTHONPATH}" PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

has() { "$python" -c "import $1" 2>/dev/null; }

install() { # REQUIREMENT...: into $extra, from WHEELS or the index
    local from=()
    [ -z "${WHEELS:-}" ] || from=(--no-index --find-links "$WHEELS")
    timeout 120 "$python" -m pip install -q --no-compile --target "$extra" --upgrade "${from[@]}" "$@"
}

python=""
for candidate in "${PYTHON:-}" "$root/.venv/bin/python" python3; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || continue
    [ -n "$python" ] || python=$candidate
    "$candidate" -c 'import cupy' 2>/dev/null && python=$candidate && break
done
[ -n "$python" ] || { echo "gpu_check: Python 3.11 or later is needed; name it with PYTHON=" >&2; exit 2; }

case " $* " in
*" --dry-run "* | *" --help "* | *" -h "*) ;;
*)
    if ! has cupy; then
        # CUDA 13 needs a driver from 580 on.
        driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
        wheel=cupy-cuda13x
        [ "${driver%%.*}" -ge 580 ] 2>/dev/null || wheel=cupy-cuda12x
        echo "gpu_check: $python has no CuPy; installing $wheel for driver ${driver:-unknown}" >&2
        install "$wheel[ctk]>=14" || {
            echo "gpu_check: CuPy could not be installed. Without a network bring wheels: see the head of $0" >&2
            exit 2
        }
    fi
    ;;
esac
for package in numpy gguf; do
    has $package || install --no-deps $package || true # what it needs is as common as NumPy
    has $package || {
        echo "gpu_check: $package is not there and could not be installed. Bring its wheel: see the head of $0" >&2
        "$python" -c "import $package" >&2 || exit 2
    }
done
compgen -G "$root/src/qwen35rt/_native*.so" >/dev/null || has qwen35rt._native ||
    echo "gpu_check: the native extension is not built; comparisons with the CPU of real shapes are left out" >&2
"$python" "$root/benchmarks/gpu_check.py" "$@"

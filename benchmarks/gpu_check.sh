#!/usr/bin/env bash
# Finds or makes a Python with CuPy and NumPy, and runs gpu_check.py with the flags given. Works without a network where
# the packages are there, or lie as wheels in the folder WHEELS:
#     pip download --only-binary=:all: -d wheels 'cupy-cuda13x[ctk]>=14' gguf     # where there is a network
#     WHEELS=wheels bash benchmarks/gpu_check.sh
# PYTHON names the Python to be used. Nothing is installed into it: what it lacks goes to a folder of its own. Files of
# the real shapes need gguf; without it the other checks are done. Everything together stays below six minutes.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -z "${WHEELS:-}" ] || WHEELS=$(cd "$WHEELS" && pwd)
extra=$(mktemp -d)
trap 'rm -rf "$extra"' EXIT
export PYTHONPATH="$extra:$root/src${PYTHONPATH:+:$PYTHONPATH}" PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
[ -n "${QWEN35RT_ORACLE:-}" ] || [ ! -d "$root/shared/oracle" ] || export QWEN35RT_ORACLE="$root/shared/oracle"
# CuPy keeps compiled modules at home; where it cannot, each phase would compile all of them.
[ -w "${HOME:-/nowhere}" ] || export CUPY_CACHE_DIR="$extra/kernels"

has() { "$python" -c "import $1" 2>/dev/null; }

install() { # SECONDS REQUIREMENT...: into $extra, from WHEELS or the index
    local from=() seconds=$1
    shift
    [ -z "${WHEELS:-}" ] || from=(--no-index --find-links "$WHEELS")
    timeout "$seconds" "$python" -m pip install -q --no-compile --target "$extra" --upgrade "${from[@]}" "$@" >&2
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
        # The second is for a machine that has CUDA's libraries, and wheels of CuPy alone.
        install 100 "$wheel[ctk]>=14" || { [ -n "${WHEELS:-}" ] && install 40 "$wheel>=14"; } || {
            echo "gpu_check: CuPy could not be installed. Without a network bring wheels: see the head of $0" >&2
            exit 2
        }
        for folder in "$extra"/nvidia/*/lib; do # CuPy looks for libraries beside the Python, not in $extra
            [ ! -d "$folder" ] || export LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
        done
    fi
    ;;
esac
has numpy || install 30 numpy || true
has numpy || { echo "gpu_check: NumPy is not there and could not be installed: see the head of $0" >&2; exit 2; }
has gguf || install 30 gguf || install 30 --no-deps gguf || true
has gguf || echo "gpu_check: gguf is not there; speed on files of the real shapes is left out" >&2
compgen -G "$root/src/qwen35rt/_native*.so" >/dev/null || has qwen35rt._native ||
    echo "gpu_check: the native extension is not built; comparisons with the CPU of real shapes are left out" >&2

# In the background, so that a signal reaches it: it then stops its phase and writes the table of what it has.
"$python" "$root/benchmarks/gpu_check.py" --seconds $((345 - SECONDS)) "$@" &
check=$!
trap 'kill -TERM "$check" 2>/dev/null || true' TERM INT
status=0
wait "$check" || status=$?
while kill -0 "$check" 2>/dev/null; do # a signal ended the wait
    wait "$check" && status=0 || status=$?
done
exit "$status"

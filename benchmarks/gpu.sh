#!/usr/bin/env bash
# Check every kernel on one GPU and time it beside its peers, in under 9 minutes:
#
#     benchmarks/gpu.sh [OUTPUT_FOLDER]
#
# Peers (adasplash, entmax, liger-kernel) are taken from wheels/*.whl if that folder exists; those that
# can't be imported are left out and named. `SMOKE=1` runs tiny sizes in Triton's interpreter on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-gpu-results}
mkdir -p "$output"
if compgen -G "wheels/*.whl" >/dev/null; then
    python3 -m pip install -q --no-index --no-deps --upgrade --target "$output/site" wheels/*.whl
    export PYTHONPATH="$output/site:${PYTHONPATH:-}"
fi
if [ "${SMOKE:-0}" = 1 ]; then
    export TRITON_INTERPRET=1
fi
PYTHONPATH=".:benchmarks:${PYTHONPATH:-}" PYTHONUNBUFFERED=1 python3 benchmarks/gpu.py "$output" | tee "$output/log.txt"
exit "${PIPESTATUS[0]}"

#!/usr/bin/env bash
# ghost.sh COMMAND...: run a command on simulated GPUs, with the Python of .venv-ghost
# (docs/internals/ghost.md).
#
# Memory, launches, copies, waits, collectives and errors match a real GPU. Computed values are
# meaningless. Variables:
#   GHOST_GPUS=1                              number of GPUs
#   GHOST_GIB=79.1                            memory of each
#   GHOST_NAME="NVIDIA H100 80GB HBM3"        its name
#   GHOST_LOG=FILE                            each process writes its GPU calls to FILE.PID
#   GHOST_RACE=FILE                           each process writes its races to FILE.PID
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv-ghost
if [[ ! -e $venv/ghost/libcuda.so.1 ]]; then
    echo "The ghost GPU is not built yet. Run tests/ghost/build.sh, which also installs the torch" \
        "CUDA wheel (4.7 GB)." >&2
    exit 2
fi
libraries=$venv/ghost
if [[ -n ${GHOST_RACE:-} ]]; then
    libraries=$venv/ghost/race
    export PYTHONPATH=$libraries${PYTHONPATH:+:$PYTHONPATH}
fi
export PATH=$venv/ghost/bin:$venv/bin:$PATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-1}
export TRITON_LIBCUDA_PATH=$libraries
export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_PRELOAD="$libraries/libcuda.so.1 $venv/ghost/libnvrtc.so.13"
exec "$@"

#!/usr/bin/env bash
# Set up .venv if necessary (without a network if python3 has all packages), then launch training
# with one process for each GPU, or one process on a CPU.
#
#   ./run_train.sh                                    the debug model, on the CPU or all GPUs
#   ./run_train.sh --job.config_file llama_8b.toml    a file here or in train_configs/
#   ./run_train.sh --help                             the keys of a job file, also as options
#
# Variables:
#   NGPU                                          number of processes on this node
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   several nodes
#   LOG_RANK                                      ranks that write to the terminal, default 0
#   PYTHON, TITANLITE_CONSTRAINTS                 see scripts/setup.sh
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
"$here/scripts/setup.sh" .
# The message of a stopped run shows this command, which resumes it.
export TITANLITE_COMMAND="$0"
exec "$here/.venv/bin/python" -P -m titanlite launch "$@"

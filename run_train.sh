#!/usr/bin/env bash
# Train: set up .venv if it is needed (without a network if python3 has all packages already), then launch one process
# for each GPU, or one on the CPU.
#
#   ./run_train.sh                                        the debug model, on the CPU or all GPUs
#   ./run_train.sh --job.config_file llama_8b.toml        a file here or in train_configs/
#   ./run_train.sh --help                                 the keys of a job file; each is an option, too
#
# Variables: NGPU (processes on this machine), NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT (more machines),
# LOG_RANK (ranks that write to the terminal, default 0), PYTHON and TITANLITE_CONSTRAINTS (see scripts/setup.sh).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
"$here/scripts/setup.sh" .
export TITANLITE_COMMAND="$0" # for the last lines of a run that ends early
exec "$here/.venv/bin/python" -P -m titanlite launch "$@"

#!/usr/bin/env bash
# Kill training at every point of a save on each layout (one rank and two, synchronous and asynchronous saves, a process
# that writes) and at N random moments spread over them; then check that every bit and every loss equals those of an
# undisturbed run.
#
#     benchmarks/kill.sh N [SEED]
set -euo pipefail
cd "$(dirname "$0")/.."
count=${1:?usage: benchmarks/kill.sh N [SEED]}
export TITANLITE_KILLS=$count TITANLITE_KILL_SEED=${2:-$RANDOM}
echo "seed $TITANLITE_KILL_SEED"
exec .venv/bin/python -m pytest tests/distributed/test_kill.py --durations=0

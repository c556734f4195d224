#!/usr/bin/env bash
# Kill training runs, and check that nothing is lost:
#
# - Kill training at every point of a save in each layout (one and two ranks, synchronous and
#   asynchronous saves), and at N random times in all layouts. All weights and losses must be
#   bitwise equal to those of an undisturbed run.
# - Kill the launcher 100 times, and send it 100 signals, during the first two seconds of a run on
#   two ranks. No process and no file may remain, and all exit codes must be documented.
#
#     benchmarks/kill.sh N [SEED]
set -euo pipefail
cd "$(dirname "$0")/.."
count=${1:?usage: benchmarks/kill.sh N [SEED]}
export TITANLITE_START_UPS=100 TITANLITE_KILLS=$count TITANLITE_KILL_SEED=${2:-$RANDOM}
echo "seed $TITANLITE_KILL_SEED"
exec .venv/bin/python -m pytest tests/distributed/test_{kill,start_up}.py --durations=0

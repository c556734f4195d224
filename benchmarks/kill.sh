#!/usr/bin/env bash
# Kill training at every point of a save on each layout (one rank and two, synchronous and asynchronous saves) and
# at N random moments spread over them; then check that every bit and every loss equals those of an
# undisturbed run. Then kill the launcher 100 times, and send it 100 signals, spread over the first two seconds of a run
# on two ranks: no process and no file may be left, and only documented exit codes are allowed.
#
#     benchmarks/kill.sh N [SEED]
set -euo pipefail
cd "$(dirname "$0")/.."
count=${1:?usage: benchmarks/kill.sh N [SEED]}
export TITANLITE_START_UPS=100 TITANLITE_KILLS=$count TITANLITE_KILL_SEED=${2:-$RANDOM}
echo "seed $TITANLITE_KILL_SEED"
exec .venv/bin/python -m pytest tests/distributed/test_{kill,start_up}.py --durations=0

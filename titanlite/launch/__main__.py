"""`python -m titanlite.launch`: what ./run_train.sh starts."""

import os
import signal

signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))  # so that Ctrl-C never gives a traceback

import sys  # noqa: E402

from titanlite.runtime import process  # noqa: E402

if __name__ == "__main__":
    process.begin()  # before the imports, because a signal can arrive while they run
    from titanlite.launch.launcher import main

    process.leave(main(sys.argv[1:]))

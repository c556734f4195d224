"""`python -m titanlite.launch`: what ./run_train.sh starts."""

import sys

from titanlite.runtime import process

if __name__ == "__main__":
    process.begin()  # before the imports: they take long enough for a signal to arrive
    from titanlite.launch.launcher import main

    process.leave(main(sys.argv[1:]))

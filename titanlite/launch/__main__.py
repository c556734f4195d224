"""`python -m titanlite.launch`: what ./run_train.sh starts."""

import sys

from titanlite.runtime import process

if __name__ == "__main__":
    process.begin()  # before the imports, because a signal can arrive while they run
    from titanlite.launch.launcher import main

    process.leave(main(sys.argv[1:]))

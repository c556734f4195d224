"""`python -m titanlite.launch`: what ./run_train.sh starts."""

import sys

from titanlite.launch.launcher import command

if __name__ == "__main__":
    command(sys.argv[1:])

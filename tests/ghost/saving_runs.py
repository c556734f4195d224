"""Train jobs that save asynchronously, and count the alarms of the race detector.

`torchrun saving_runs.py OUT` writes a JSON file for each rank, OUT.RANK: job -> number of alarms.
The file runs.json in the same folder maps jobs to options.
"""

import json
import os
import sys
from pathlib import Path

from removed_waits import SAVES, count_alarms  # this also registers hooks


def main(out: Path) -> None:
    alarms = {}
    for name, options in json.loads(out.with_name("runs.json").read_text()).items():
        folder = out.with_name(name.replace(" ", "_"))
        alarms[name] = count_alarms(f"{SAVES} {options}", folder)
    out.with_name(f"{out.name}.{os.environ['RANK']}").write_text(json.dumps(alarms))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

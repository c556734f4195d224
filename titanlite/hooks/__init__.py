"""Optional parts of a run, one hook per file. `titanlite/train/build.py` defines their order."""

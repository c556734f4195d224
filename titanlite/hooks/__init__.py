"""What a run does beside its steps: one hook a file. titanlite/train/build.py has them in their order."""

"""What a run's files say, for people: its state at a glance, and a page with all of it.

Invariant: the files are only read, without torch, while the run goes on or on another machine. Others may have written
them, so damage is named and text from them is shown as text.
"""

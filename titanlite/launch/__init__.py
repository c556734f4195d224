"""Processes on a machine: the launcher checks a job and starts its workers, the agent looks after them."""

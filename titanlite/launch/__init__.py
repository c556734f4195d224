"""Starts the processes of a machine: the launcher checks a job, and the agent starts the workers and watches them."""

"""A process among processes: the world of ranks, signals, and where a rank stands when it hangs."""

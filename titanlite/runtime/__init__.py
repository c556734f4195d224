"""The process of a rank: process groups, signals and logging."""

"""The process of a rank: its place in the world, its signals, its log, and the report of a hang."""

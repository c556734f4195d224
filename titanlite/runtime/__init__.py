"""The process of a rank: its place in the world, its signals, and its log."""

"""Data sources: text, JSON Lines, Parquet, Hugging Face `datasets`, token shards, token files."""

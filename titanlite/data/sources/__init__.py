"""Where documents come from: local files, tables, Hugging Face `datasets`, prepared shards."""

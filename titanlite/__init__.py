"""titanlite: pretrain Llama-style language models, from one laptop CPU up to thousands of GPUs."""

__version__ = "0.2.0"

"""Mistakes that `titanlite prove` must find; see catalog.py."""

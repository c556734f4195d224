"""Monitor runs: read their status from files and make an HTML page that compares them.

Invariant: The files of a run are only read, and torch is not imported. Therefore, the run may still
be training or may be on another node. The files are untrusted: damage is reported, and text from
them is escaped.
"""

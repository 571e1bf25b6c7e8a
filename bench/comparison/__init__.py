"""Attention on a CPU beside torch's own, a ring beside one process, and beside a peer. The command is attention.py."""

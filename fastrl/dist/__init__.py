"""Processes: collectives, checkpoints, sharding, exchange of sequences and of weights."""

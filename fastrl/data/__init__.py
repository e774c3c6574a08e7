"""Prompts, the ragged batch, and how sequences become micro-batches."""

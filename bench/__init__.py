"""Benchmarks: `pytest bench/`, `python -m bench.compare A B`. See README.md."""

"""Generation: one protocol (`engine.py`) and the engines behind it."""

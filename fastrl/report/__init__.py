"""What a run shows: the terminal, metrics files, trackers, health lines, curves, and `fastrl doctor`."""

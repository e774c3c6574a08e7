"""`python -m fastrl` is the `fastrl` command (torchrun starts it this way)."""

from fastrl.cli import main

if __name__ == "__main__":
    main()

"""``python -m pipegraph``: the command line, as torchrun starts it."""

from pipegraph.cli import main

if __name__ == "__main__":
    main()

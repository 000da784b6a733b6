"""``python -m pipegraph``: the command line, as torchrun starts it."""

import sys

# Python puts the working folder there for -m: a file html.py in it would be imported in place of the library's. A model
# file finds its neighbours all the same.
if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]

from pipegraph.cli import main

if __name__ == "__main__":
    main()

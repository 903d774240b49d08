"""`python -m kvgraph`: the command line."""

from kvgraph.cli import main

if __name__ == "__main__":  # worker processes of a command import this module
    main()

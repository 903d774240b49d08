"""`python -m kvgraph`: the command line."""

from kvgraph.cli import main

main()

"""`kvgraph bench`: artifacts and peers under one protocol, with the machine's own limits.

    command -> plan (engines and cases; every argument is checked here)
            -> run (a process per engine, limits read between them)
            -> figures (tokens/s, share of the limits, ratio to peers) -> table, JSON, plot

It runs artifacts, so it may import `runtime`. Peers are other engines, each in its own Python
interpreter, which need not have kvgraph installed.
"""

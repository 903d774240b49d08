"""`kvgraph bench`: artifacts and peers under one protocol, with the machine's own limits.

    command -> plan (what is measured; all that can be refused is refused here)
            -> run (a process per engine, limits read between them)
            -> figures (tokens/s, share of the limits, ratio to peers) -> table, JSON, plot

It runs artifacts, and so stands above `runtime`; peers are other engines, each in an interpreter of
its own, which need not have kvgraph installed.
"""

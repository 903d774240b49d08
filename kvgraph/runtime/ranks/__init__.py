"""Tensor-parallel artifacts: one session for each rank, led by that of rank 0.

    launched    this process's rank, from torchrun's environment
    meeting     processes of one machine connect, and compare the artifacts that they run
    hosts       processes of several machines do so, through torch.distributed's store
    connections between machines
    gloo        transfers the pieces of collectives between machines
    wire        messages between the leader and a follower, with memory that both map
    leader      rank 0's session: sends each step to the followers, and runs its own part
    follower    the other ranks: run the steps that the leader sends
    open        the session of this process's rank, or of all ranks as threads

An engine sees one session with a device for each rank. On one machine, the leader maps the pools of
all ranks too, so manager, prefix cache and tiers work as on one device.
"""

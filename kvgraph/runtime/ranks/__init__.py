"""Tensor-parallel artifacts: one session for each rank, led by that of rank 0.

    launched    which rank this process is, from torchrun's environment
    meeting     the processes of one machine find each other, and agree on what they run
    hosts       those of several machines do, by torch.distributed's store
    connections between them
    gloo        carries the pieces of their collectives
    wire        messages between the leader and a follower, with memory that both map
    leader      rank 0's session: hands each step to the followers, and runs its own part
    follower    the other ranks: run what the leader hands them
    open        the session of this process's rank, or of all ranks as threads

An engine sees one session with a device for each rank. On one machine pools of all ranks are memory
that the leader maps too, so its manager, prefix cache and tiers need not know.
"""

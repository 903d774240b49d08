"""Tensor-parallel artifacts: one session for each rank, led by that of rank 0.

    launched    which rank this process is, from torchrun's environment
    meeting     the processes of one machine find each other, and agree on what they run
    wire        messages between the leader and a follower, with memory that both map
    leader      rank 0's session: hands each step to the followers, and runs its own part
    follower    the other ranks: run what the leader hands them
    local       all ranks as threads of one process

An engine sees one session with a device for each rank; pools of all ranks are memory that the
leader maps too, so its manager, prefix cache and tiers need not know.
"""

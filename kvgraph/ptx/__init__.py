"""Execution of PTX on a CPU, exactly, in NumPy: the PTX is the input of ptxas.

    module = ptx.parse(text)
    memory = ptx.Memory()
    x = memory.add(array, "x")
    counters = ptx.run(module.kernels["scale"], memory, grid=(8, 1, 1), threads=128, arguments=[x])

    parser      text -> instructions
    machine     decodes each once, runs blocks in batches, handles barriers
    arithmetic, bits, convert, moves, access, matrix, warpgroup
                the instructions, by family
    memory, shared, state, counters
                the state that they work on, checks, and counts

It does not check SASS, ptxas, the driver, the order of memory between blocks, or speed.
"""

from kvgraph.ptx.counters import Counters
from kvgraph.ptx.machine import run
from kvgraph.ptx.memory import Memory
from kvgraph.ptx.parser import Kernel, Module, Parameter, parse

__all__ = ["Counters", "Kernel", "Memory", "Module", "Parameter", "parse", "run"]

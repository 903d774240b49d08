"""Triton kernels of the paged-cache ops and of what stands around them.

shapes.py says what a kernel is specialised on, launch.py which kernels exist and with which grids
they are launched (neither imports a framework), aot.py compiles them to cubins without a GPU, and
run.py launches them on torch tensors. The other files are the kernels, and need Triton.
"""

"""Triton kernels of the paged-cache ops and of what stands around them.

shapes.py says what a kernel is specialised on, variants.py which kernels exist, and launch.py with
which grids they are launched (none imports a framework); experts_plan.py and linear_plan.py say
both of matrix products, over the tiles of matrix_tiles.py. aot.py compiles them to cubins without a
GPU, record.py writes what a graph's node says of them, and run.py launches them on torch tensors.
The other files are the kernels, and need Triton.
"""

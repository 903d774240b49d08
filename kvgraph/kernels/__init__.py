"""Triton kernels of the paged-cache ops and of the ops around them.

shapes.py has the constants of kernels, variants.py the list of kernels, and launch.py the grids of
their launches (none imports a framework). experts_plan.py and linear_plan.py have variants and
launches of matrix products, over the tiles of matrix_tiles.py. aot.py compiles kernels to cubins
without a GPU, stored.py reads them from an artifact, record.py writes their record for a graph's
node, and run.py launches them on torch tensors. The other files are the kernels, and need Triton.
"""

"""The schedule in pure Python: tiles, block order, workspace, protocol and its model checker.

Nothing here imports torch or a GPU library. The model checker, the CPU reference and the constants of the kernels all
come from this package, so what is checked is what runs.
"""

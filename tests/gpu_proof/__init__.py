"""Proofs of the Triton kernels without a GPU: interpreted on CPU tensors, and compiled ahead of time.

They need the package `triton`, which only `make gpu-proof` installs, and skip without it.
"""

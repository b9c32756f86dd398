"""Kernels of our own for CPU: done without where they do not fit or cannot be built."""

from workers.model.native.attention import Kernel, NativeStep, lay_out_natively, load_kernel
from workers.model.native.decoder import NativeDecoder, pack, recognise

__all__ = ["Kernel", "NativeDecoder", "NativeStep", "lay_out_natively", "load_kernel", "pack", "recognise"]

"""The op family composed of ggml's own ops, for devices and shapes without a kernel. One file a kind of op.

What depends on the run (whose slot, how many rows are pending, which positions are seen) comes as row numbers in input
tensors: :mod:`pyllama_dflash.lane_inputs`. Rows that do not count are replaced by rows that change nothing, never
multiplied by zero, so that a NaN or an infinity in them stays where it is.
"""

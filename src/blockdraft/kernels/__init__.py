"""Native code for what lies between the matrix products of a step on a CPU.

Compiled on the machine when first needed, from the sources beside this file, and kept in the cache.
Where that is not possible, or the environment says `BLOCKDRAFT_KERNELS=off`, everything runs on
torch's operations; a process uses one or the other throughout.
"""

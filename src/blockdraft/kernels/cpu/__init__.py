"""Native code for a step on a CPU: products, what lies between them, and whole layers.

Compiled on the machine when first needed, from the sources beside this file, and kept in the cache.
Where that is not possible, or the environment says `BLOCKDRAFT_KERNELS=off`, everything runs on
torch's operations; a process uses one or the other throughout.
"""

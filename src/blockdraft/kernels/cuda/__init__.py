"""A CUDA device with Triton kernels. Private; see `blockdraft.kernels`.

`source` holds the kernels, `ops` launches them, `attention` follows a plan over pages, `backend`
puts them together, and `check` tells whether the card keeps to what they promise. One rule stands
behind all of them: a program computes with tiles of one size, and nothing that it is compiled for
depends on the number of rows. So a row's sums have one order.
"""

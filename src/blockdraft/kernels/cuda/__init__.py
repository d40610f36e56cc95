"""A CUDA device with Triton kernels. Private; see `blockdraft.kernels`.

`source` holds the kernels, `ops` launches them, `tiles` says which tile a product has, `attention`
follows a plan over pages, `backend` puts them together, and `check` tells whether the card keeps to
what they promise. One rule stands behind all of them: a row's sums have one order, that of its
inputs and of its own keys, and no number of rows changes it. Where the number of rows chooses among
kernels, all of them have the same bits, and the check finds out whether that holds on the card.
"""

"""The mathematics: targets, drafters, and what both are built from.

`target` runs any transformers causal LM so that no row depends on the rows beside it. `draft` holds
the models that guess: DFlash and DFlash 2, EAGLE-3, the Hydra head. `layers` are their parts in
few and large operations, recurrent and quantized ones among them. `attention` says who sees whom.
Each imports only those named behind it.
"""

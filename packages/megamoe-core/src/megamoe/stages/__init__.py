"""The stages of the pipeline: one file each, its contract in the docstring, its torch reference as its body.

    quantize_input -> route -> dispatch -> gemm1 -> swiglu_quant -> gemm2 -> p2p -> combine

The functions are pure and know no protocol: `megamoe.reference` puts them between the regions and flags of
`megamoe.schedule`. A backend is right when its numbers match them.
"""

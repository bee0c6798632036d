"""The same layer without fusion, to measure the fused one against: exchange, experts, exchange.

exchange   who moves tokens to the ranks of their experts and sums the rows that come back: Mori's dispatch and combine
           on AMD GPUs, collectives of PyTorch on a stand-in
experts    what a rank does with the tokens that it received: sort by expert, GEMM1, GEMM2, sum per token
pipeline   the two together, with the quantisation in front

It computes what the fused kernels compute, with the same formats, weights and main loop, but for the roundings between
its pieces: rows are rounded to BF16 after GEMM2, and summed on their rank before they travel.
"""

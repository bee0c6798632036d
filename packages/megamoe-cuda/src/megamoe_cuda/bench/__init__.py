"""Benchmarks of the CUDA kernel beside its peers.

seed_sm90    the suite of the seed's shape: which shapes, routings and token counts
modes        the suite of the kernel's modes beside each other
shapes       the suite of other models' layers
skew         the suite of skewed routing
rank         one rank of a measurement: session, peers, inputs, timing
timing       interleaved timing with a flushed L2 cache and a barrier before each call
unfused      peer: NCCL all-to-all, PyTorch's scaled grouped GEMM, SwiGLU and quantisation in Triton
deep_gemm    peer: the fused SM90 kernels of sgl-deep-gemm
published    figures that other projects published for the same shape
"""

"""Adapters to inference engines, each behind an extra of its own; importing one imports no engine.

transformers    `register()` an experts implementation and an expert-parallel implementation
vllm            a quantisation method for FP8-block checkpoints, through vLLM's plugin entry points
sglang          a MoE runner for FP8-block checkpoints, through SGLang's plugin entry points
engine_layer    what adapters to serving engines share: one MoE layer, opened and ready to be called
sessions        what adapters share: the backend for a model's device, and one session per problem
versions        the releases that an adapter was written for
"""

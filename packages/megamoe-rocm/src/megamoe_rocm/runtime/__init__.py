"""What runs the launches of a call: one module for each kind of device.

launcher     what a session asks of it, and Triton's interpreter
arguments    the bytes of a kernel's arguments
nvidia       an NVIDIA GPU, for tests: kernels compiled by Triton, launched by the CUDA driver
hip_runtime  an AMD GPU: code objects of the wheel, launched through hip-python
"""

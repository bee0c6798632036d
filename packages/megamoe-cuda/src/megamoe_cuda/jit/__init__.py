"""From a plan to machine code: generated constants, compilation by NVRTC, and the cache of what was compiled."""

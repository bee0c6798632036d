"""What others published for the seed's shape (H=4096, I=2048, 256 experts over EP8, top-8), microseconds on 8 H200s.

Source: the pull request "Add SM90 MegaMoE by cooperative" to DeepGEMM, its table of the single operator. Measured on
other machines than the row they stand beside, and on eight GPUs where ours are two with EP8-equivalent routing.
"""

from __future__ import annotations

_TOKENS = (8, 128, 256, 512, 1024, 2048, 4096, 8192)
_COLUMNS: dict[str, tuple[float | None, ...]] = {
    "seed kernel (published, 8 GPUs)": (265.9, 283.8, 354.4, 501.1, 767.9, 1312.4, 2377.1, 4695.2),
    "DeepEP V1 contiguous (published, 8 GPUs)": (1649.1, 1533.7, 1635.3, 1900.7, 2336.9, 3341.1, 5320.2, 9408.6),
    "DeepEP V1 low-latency (published, 8 GPUs)": (272.6, 327.1, 389.3, 557.0, 899.6, 1597.4, None, None),
    "DeepEP V2 (published, 8 GPUs)": (332.5, 380.4, 434.8, 566.5, 888.0, 1543.5, 2878.6, 5516.0),
}


def published(num_tokens: int) -> dict[str, float]:
    """Name -> microseconds at `num_tokens` tokens per rank; empty for a count that was not published."""
    if num_tokens not in _TOKENS:
        return {}
    index = _TOKENS.index(num_tokens)
    return {name: value for name, column in _COLUMNS.items() if (value := column[index]) is not None}

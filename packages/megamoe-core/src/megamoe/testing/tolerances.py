"""How close is close enough, and why.

Two yardsticks, both from docs/numerics.md:

* the *oracle* multiplies dequantised weights with unquantised activations in FP32. What separates a correct backend
  from it is quantisation noise, which the mode fixes; the gates are set a little above that noise and say only that the
  right thing is computed at the right precision.
* the *staged reference* rounds where the mode rounds. What separates a correct backend from it is the order of FP32
  additions, which now and then flips the last step of a code; the bounds are tight enough to show a misplaced scale.

Measures are taken in FP64 over all elements; a row measure keeps one wrong row from drowning in a thousand right ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamoe.problem import ActFormat, MoEProblem, QuantMode, Transport


@dataclass(frozen=True, kw_only=True)
class OracleGate:
    """Largest distance from the oracle, on Gaussian activations.

    Args:
        rel_l2: ||got - oracle|| / ||oracle|| over the whole output.
        row_rel_l2: the same for the worst row. A row holds fewer samples of the noise than the output: it gets twice.
        calc_diff: 1 - 2 (x·y) / (x·x + y·y), DeepGEMM's measure; None where no gate is agreed on.
    """

    rel_l2: float
    row_rel_l2: float
    calc_diff: float | None = None


# The gates of docs/numerics.md. One rounding to e4m3 (3 mantissa bits) is 0.026 off, one to e2m1 (1 bit) 0.11 to 0.16;
# A1 goes through gate and up, then A2 is rounded. Measured on the reference, all Gaussian CPU cases, 2026-11 (relL2 of
# the output / of the worst row): bf16 0.003 / 0.004, a8w8 and a8w4 0.048 / 0.076, over the FP8 transport 0.057 / 0.070,
# a4w4 0.233 / 0.32.
ORACLE_GATES = {
    QuantMode.BF16: OracleGate(rel_l2=0.01, row_rel_l2=0.02),
    QuantMode.A8W8: OracleGate(rel_l2=0.06, row_rel_l2=0.12, calc_diff=0.002),
    QuantMode.A8W4: OracleGate(rel_l2=0.06, row_rel_l2=0.12),
    QuantMode.A4W4: OracleGate(rel_l2=0.25, row_rel_l2=0.50),
}
# The FP8 transport rounds each weighted row once more, by 0.026: inside the gates of the quantised modes, not inside
# bf16's. Measured 0.027 / 0.031.
BF16_OVER_FP8_TRANSPORT = OracleGate(rel_l2=0.04, row_rel_l2=0.08)


def oracle_gate(problem: MoEProblem) -> OracleGate:
    """The gate of a layer: its mode's, or the wider one of bf16 over the FP8 transport."""
    if problem.quant is QuantMode.BF16 and problem.transport is Transport.FP8_BLOCKWISE_1X32:
        return BF16_OVER_FP8_TRANSPORT
    return ORACLE_GATES[QuantMode(problem.quant)]


@dataclass(frozen=True, kw_only=True)
class StagedBounds:
    """Largest distance from the staged reference.

    Args:
        gate_up_rel_l2: GEMM1 accumulators.
        scale_rel: relative distance of a floating-point A2 scale.
        scale_steps: distance of an E8M0 A2 scale in powers of two.
        code_steps: distance of an A2 code, in steps of its format, in a block whose E8M0 scale differs; 1 elsewhere.
        code_fraction: fraction of A2 codes, and of E8M0 scales, that may differ at all.
        far_fraction: fraction of A2 codes under equal E8M0 scales that may differ by more than one step.
        contribution_rel_l2: weighted GEMM2 rows before the transport.
        y_rel_l2: the output.
        y_row_rel_l2: the worst output row.
    """

    gate_up_rel_l2: float
    scale_rel: float
    scale_steps: int
    code_steps: int
    code_fraction: float
    far_fraction: float
    contribution_rel_l2: float
    y_rel_l2: float
    y_row_rel_l2: float

    def y_limit(self, num_rows: int) -> float:
        """`y_rel_l2` for an output of `num_rows` rows that are not zero: one of them may be at the bound of a row.

        A code flips or it does not, and in a few rows one flip is seen: of 4000 right results of two rows (simulated,
        a8w8, I = 128, GEMM1's measured error) 2% exceed 0.01, the worst is 0.026 off. From 11 rows up a scale per 64
        (0.021) exceeds a8w8's limit; in fewer, stage taps show it.
        """
        return math.hypot(self.y_rel_l2, self.y_row_rel_l2 / math.sqrt(max(num_rows, 1)))


# a8w8, calibrated on an H200 (2026-11-30, kernel ff97613, the matrix's 103 cases over BF16 at EP 1 to 8), the worst of
# each: GEMM1 1.5e-4 off (Hopper's FP8 accumulator keeps 13 to 14 bits between promotions); A2 scales 9.5e-4, 1.2e-3 on
# heavy-tailed input; 0.54% of A2 codes differ; the output 0.0065, its median 0.004. A wrong scale granularity gives
# 0.021 and must stay outside.
#   Rows: where I is 128 and a token has one or two picks, one flipped code moves a row by its share in it: 0.034.
#   Far codes: under a tight clamp (1.5, gates of 8), GEMM1's error is that of the unclamped value, and what lies inside
#   the clamp moves by up to 14 steps, in 2e-5 of all codes (simulated with GEMM1's measured error).
# a8w4 and a4w4 may flip an E8M0 scale whose amax sits on a power of two: then all 32 codes move by up to a binade,
# which is 8 steps of e4m3 and 2 of e2m1.
# bf16 has no scales; a flipped code is one BF16 step, 2^-8 of the value.
STAGED_BOUNDS = {
    QuantMode.BF16: StagedBounds(
        gate_up_rel_l2=5e-5, scale_rel=0.0, scale_steps=0, code_steps=1, code_fraction=0.02, far_fraction=0.0,
        contribution_rel_l2=1e-3, y_rel_l2=2e-3, y_row_rel_l2=4e-3,
    ),
    QuantMode.A8W8: StagedBounds(
        gate_up_rel_l2=5e-4, scale_rel=1.5e-3, scale_steps=0, code_steps=1, code_fraction=0.01, far_fraction=1e-4,
        contribution_rel_l2=0.01, y_rel_l2=0.01, y_row_rel_l2=0.06,
    ),
    QuantMode.A8W4: StagedBounds(
        gate_up_rel_l2=5e-4, scale_rel=1e-3, scale_steps=1, code_steps=8, code_fraction=0.01, far_fraction=0.0,
        contribution_rel_l2=0.01, y_rel_l2=0.01, y_row_rel_l2=0.03,
    ),
    QuantMode.A4W4: StagedBounds(
        gate_up_rel_l2=5e-4, scale_rel=0.0, scale_steps=1, code_steps=2, code_fraction=0.01, far_fraction=0.0,
        contribution_rel_l2=0.02, y_rel_l2=0.02, y_row_rel_l2=0.06,
    ),
}  # fmt: skip

# Where the rows that two backends round to e4m3 differ by d, a code flips with probability |d| / step and moves by a
# whole step: the square of the distance grows by step * |d|, which over Gaussian rows is 0.058 d in units of the row.
# d = 0.0044 (the output over BF16) gives at most 0.016; less where few rows hold most of the distance. Measured on the
# same H200, 28 cases: 0.0135, worst row 0.039. A wrong scale granularity (d = 0.021) gives 0.035 and must stay outside.
A8W8_OVER_FP8_TRANSPORT_Y_REL_L2 = 0.02


# The same for bf16, whose FP32 rows are about 1e-4 apart (BF16 steps of A2 that flip): 0.0024. Measured, 16 cases at EP
# 1 to 8: 0.0027, worst row 0.0072.
BF16_OVER_FP8_TRANSPORT_Y_REL_L2 = 0.004
BF16_OVER_FP8_TRANSPORT_Y_ROW_REL_L2 = 0.012


def sampling_error(num_values: int) -> float:
    """How far the measured noise of so few values may be from its expectation, relatively.

    1 / sqrt(n) for n blocks of 32, since the values of a block share a scale: 0.01 for 200 rows of 2048, 0.25 for two
    rows of 256. Random small cases were up to 1.01 times a gate without it.
    """
    return 1 / math.sqrt(max(num_values / 32, 1.0))


def staged_bounds(problem: MoEProblem) -> StagedBounds:
    """What a backend that runs `problem` is held to."""
    # a8w4 with FP8 activations multiplies e4m3 operands and scales A2 per 128, as a8w8 does.
    quant = QuantMode.A8W8 if problem.act_format is ActFormat.FP8_1X128 else QuantMode(problem.quant)
    bounds = STAGED_BOUNDS[quant]
    if quant is QuantMode.A8W8 and problem.transport is Transport.FP8_BLOCKWISE_1X32:
        return replace(bounds, y_rel_l2=A8W8_OVER_FP8_TRANSPORT_Y_REL_L2)
    if quant is QuantMode.BF16 and problem.transport is Transport.FP8_BLOCKWISE_1X32:
        return replace(
            bounds,
            y_rel_l2=BF16_OVER_FP8_TRANSPORT_Y_REL_L2,
            y_row_rel_l2=BF16_OVER_FP8_TRANSPORT_Y_ROW_REL_L2,
        )
    return bounds


def rel_l2(got: Tensor, expected: Tensor) -> float:
    """||got - expected|| / ||expected||; 0 for two empty or all-zero tensors, inf for a NaN that is not expected."""
    difference = (got.double() - expected.double()).norm().item()
    norm = expected.double().norm().item()
    if difference != difference:
        return float("inf")
    return difference / norm if norm > 0 else (0.0 if difference == 0 else float("inf"))


def row_rel_l2(got: Tensor, expected: Tensor) -> Tensor:
    """relL2 of each row, `[rows]` FP64.

    A row that nearly cancels out (two picks of one expert with opposite weights) has noise of its terms' size, not of
    its own: it is measured against a quarter of the root mean square row norm instead.
    """
    if expected.numel() == 0:
        return torch.zeros(expected.shape[0], dtype=torch.float64, device=expected.device)
    difference = (got.double() - expected.double()).norm(dim=-1)
    norms = expected.double().norm(dim=-1)
    floor = 0.25 * norms.square().mean().sqrt()
    measured = difference / norms.clamp(min=floor.item() or 1.0)
    return torch.where(measured.isnan(), torch.inf, measured)


def calc_diff(got: Tensor, expected: Tensor) -> float:
    """1 - 2 (x·y) / (x·x + y·y): 0 for equal tensors, also for two all-zero ones."""
    x, y = got.double(), expected.double()
    denominator = (x.square() + y.square()).sum().item()
    return 1 - 2 * (x * y).sum().item() / denominator if denominator else 0.0


def ordered_codes(payload: Tensor) -> Tensor:
    """Codes of a floating-point payload as integers in the order of their values: neighbours are one step apart.

    Args:
        payload: BF16 or e4m3fn values, or uint8 with two e2m1 codes a byte, the even element in the low nibble.

    Returns:
        int32; +0 and -0 are both 0.

    Raises:
        TypeError: another dtype.
    """
    if payload.dtype == torch.uint8:
        codes = torch.stack((payload & 0xF, payload >> 4), dim=-1).flatten(-2).int()
        magnitude_mask = 0x7
    elif payload.dtype == torch.float8_e4m3fn:
        codes, magnitude_mask = payload.view(torch.uint8).int(), 0x7F
    elif payload.dtype == torch.bfloat16:
        codes, magnitude_mask = payload.view(torch.int16).int() & 0xFFFF, 0x7FFF
    else:
        raise TypeError(f"no ordered codes for {payload.dtype}")
    magnitude = codes & magnitude_mask
    return torch.where(codes > magnitude_mask, -magnitude, magnitude)


def code_distance(got: Tensor, expected: Tensor) -> Tensor:
    """Steps between two payloads of one format, element by element, int32."""
    return (ordered_codes(got) - ordered_codes(expected)).abs()


def same_bits(got: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal byte for byte: NaN equals the same NaN, +0 differs from -0."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    return torch.equal(got.contiguous().view(torch.uint8), expected.to(got.device).contiguous().view(torch.uint8))

"""Floors: what no implementation of the layer can be faster than on a device."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.bench.results import BenchRow, layer_flops
from megamoe.formats import weight_format
from megamoe.problem import MoEProblem, QuantMode
from megamoe.schedule.device_spec import DeviceSpec


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Lower bounds of one rank's call, microseconds.

    Args:
        weights_us: reading the weights of the experts that are expected to be touched, once.
        flops_us: the two GEMMs at the device's measured rate for the operands.
    """

    weights_us: float
    flops_us: float

    @property
    def us(self) -> float:
        """What the GEMMs can't beat: the larger of weights and FLOPs. Rows on the links can hide behind them."""
        return max(self.weights_us, self.flops_us)


def floor(problem: MoEProblem, num_tokens: int, device: DeviceSpec) -> Floor:
    """Floors under uniform routing, `num_tokens` on every rank.

    Args:
        problem: the layer.
        num_tokens: per rank.
        device: its rates.
    """
    flops = layer_flops(problem, num_tokens)
    rate = flop_rate(problem, device)
    weights = touched_experts(problem, num_tokens) * expert_bytes(problem)
    return Floor(weights_us=weights / device.hbm_bytes_per_s * 1e6, flops_us=flops / rate * 1e6)


def flop_rate(problem: MoEProblem, device: DeviceSpec) -> float:
    """FLOP/s of the matrix units for the wider of the two operands; BF16's where the device lacks the format."""
    rates = {
        QuantMode.BF16: device.bf16_flops,
        QuantMode.A8W8: device.fp8_flops,
        QuantMode.A8W4: device.fp8_flops,
        QuantMode.A4W4: device.fp4_flops,
    }
    return rates[QuantMode(problem.quant)] or device.bf16_flops


def touched_experts(problem: MoEProblem, num_tokens: int) -> float:
    """Expected local experts with at least one row, when every token picks top_k distinct experts uniformly."""
    untouched = (1 - problem.top_k / problem.num_experts) ** (num_tokens * problem.ep_size)
    return problem.num_local_experts * (1 - untouched)


def expert_bytes(problem: MoEProblem) -> int:
    """Bytes of one expert's weights and scales in the mode's format, biases left out."""
    fmt = weight_format(problem.quant)
    hidden, inter = problem.hidden_size, problem.intermediate_size
    total = 0
    for rows, columns in ((2 * inter, hidden), (hidden, inter)):
        total += rows * columns // fmt.values_per_item * fmt.payload_dtype.itemsize
        if fmt.scale_dtype is not None:
            scale_rows, scale_columns = fmt.scale_shape((rows, columns))
            total += scale_rows * scale_columns * fmt.scale_dtype.itemsize
    return total


def weight_bytes(problem: MoEProblem) -> int:
    """Bytes of one rank's experts, biases left out."""
    return problem.num_local_experts * expert_bytes(problem)


def floor_of(row: BenchRow, device: DeviceSpec) -> Floor:
    """Floors of a measured configuration."""
    return floor(row.problem, row.num_tokens, device)

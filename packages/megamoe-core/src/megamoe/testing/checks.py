"""What a result is held to. Each function raises AssertionError with the number, the bound and where it was broken.

The conformance tests call these, and so do the mutation tests, which show that a wrong backend does not pass them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megamoe.backend import StageTaps
from megamoe.formats import Quantized
from megamoe.problem import MoEProblem
from megamoe.testing.data import Call
from megamoe.testing.tolerances import (
    StagedBounds,
    calc_diff,
    code_distance,
    oracle_gate,
    rel_l2,
    row_rel_l2,
    same_bits,
    sampling_error,
    staged_bounds,
)


def check_shape(problem: MoEProblem, calls: Sequence[Call], outputs: Sequence[Tensor]) -> None:
    """Every rank's output is `[T, H]` BF16, and rows without any expert are exactly zero."""
    assert len(outputs) == len(calls), f"{len(outputs)} outputs for {len(calls)} ranks"
    for rank, (call, y) in enumerate(zip(calls, outputs)):
        assert tuple(y.shape) == (call.num_rows, problem.hidden_size), f"rank {rank} returned {tuple(y.shape)}"
        assert y.dtype == torch.bfloat16, f"rank {rank} returned {y.dtype}"
        valid = (call.topk_ids >= 0) & (call.topk_ids < problem.num_experts)
        empty = ~valid.any(-1).to(y.device)
        assert (y[empty] == 0).all(), f"rank {rank}: rows {_first(y[empty].ne(0).any(-1))} have no expert but a value"


def check_oracle(problem: MoEProblem, outputs: Sequence[Tensor], oracle: Sequence[Tensor]) -> None:
    """Hold the outputs of all ranks to the FP32 oracle: the whole, and each row."""
    got, expected = _joined(outputs, oracle)
    gate = oracle_gate(problem)
    slack = 1 + sampling_error(got.numel())
    distance, limit = rel_l2(got, expected), gate.rel_l2 * slack
    assert distance < limit, f"relL2 {distance:.4g} from the oracle; the gate is {limit:.4g}"
    _check_rows(got, expected, gate.row_rel_l2, "the oracle", outputs)
    if gate.calc_diff is not None:
        difference, limit = calc_diff(got, expected), gate.calc_diff * slack**2
        assert difference < limit, f"calc_diff {difference:.4g} from the oracle; the gate is {limit:.4g}"


def check_staged(problem: MoEProblem, outputs: Sequence[Tensor], staged: Sequence[Tensor]) -> None:
    """Hold the outputs of all ranks to the staged reference: the whole, and each row."""
    got, expected = _joined(outputs, staged)
    bounds = staged_bounds(problem)
    num_rows = int(expected.ne(0).any(-1).sum())
    distance, limit = rel_l2(got, expected), bounds.y_limit(num_rows)
    assert distance < limit, f"relL2 {distance:.4g} from the staged reference; the bound is {limit:.4g}"
    _check_rows(got, expected, bounds.y_row_rel_l2, "the staged reference", outputs)


def check_taps(problem: MoEProblem, taps: Sequence[StageTaps | None], staged: Sequence[StageTaps]) -> None:
    """Hold what stood between the stages to the staged reference, rank by rank."""
    bounds = staged_bounds(problem)
    assert len(taps) == len(staged)
    for rank, (got, expected) in enumerate(zip(taps, staged)):
        if got is None:
            num_rows = len(expected.src_pick)
            assert num_rows == 0, f"rank {rank} says that it received no rows; {num_rows} were sent"
            continue
        order = _matching_rows(rank, got, expected)
        if got.gate_up is not None and expected.gate_up is not None:
            distance = rel_l2(got.gate_up.cpu()[order], expected.gate_up.cpu())
            assert distance < bounds.gate_up_rel_l2, (
                f"rank {rank}: GEMM1 relL2 {distance:.4g} >= {bounds.gate_up_rel_l2}"
            )
        _check_a2(rank, got.a2, expected.a2, order, bounds)
        if got.contribution is not None and expected.contribution is not None:
            distance = rel_l2(got.contribution.cpu()[order], expected.contribution.cpu())
            limit = bounds.contribution_rel_l2
            assert distance < limit, f"rank {rank}: weighted GEMM2 rows relL2 {distance:.4g} >= {limit}"


def check_receive_counts(problem: MoEProblem, calls: Sequence[Call], counts: Sequence[Tensor]) -> None:
    """Every rank's received rows per local expert are those that the ids say."""
    ids = torch.cat([call.topk_ids[: _num_tokens(call)].flatten().cpu() for call in calls]).long()
    ids = ids[(ids >= 0) & (ids < problem.num_experts)]
    expected = torch.bincount(ids, minlength=problem.num_experts).view(problem.ep_size, -1)
    for rank, got in enumerate(counts):
        assert got.dtype == torch.int32, f"rank {rank}: receive_counts are {got.dtype}, expected int32"
        assert torch.equal(got.cpu().long(), expected[rank]), (
            f"rank {rank} received {got.tolist()}, sent were {expected[rank].tolist()}"
        )


def check_same_bits(got: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    """Two lists of outputs are equal byte for byte; `what` says between what."""
    assert len(got) == len(expected)
    for rank, (one, other) in enumerate(zip(got, expected)):
        one, other = one.cpu(), other.cpu()
        if not same_bits(one, other):
            rows = (
                _first((one.view(torch.int16) != other.view(torch.int16)).any(-1)) if one.shape == other.shape else "?"
            )
            raise AssertionError(f"bits differ {what}: rank {rank}, rows {rows}")


FEW = 3  # values that may always differ: in a case of a few rows a single flipped code is more than 1%


def _check_a2(rank: int, got: Quantized, expected: Quantized, order: Tensor, bounds: StagedBounds) -> None:
    steps = _code_steps(got, expected, order)
    same_scale = torch.ones_like(steps, dtype=torch.bool)
    if expected.scales is None or got.scales is None:
        assert got.scales is expected.scales, f"rank {rank}: A2 has scales on one side only"
    else:
        scales = got.scales.cpu()[order]
        assert scales.shape == expected.scales.shape, f"rank {rank}: A2 scales are {tuple(scales.shape)}"
        if scales.dtype == torch.float32:
            _check_fp32_scales(rank, scales, expected.scales.cpu(), bounds)
        else:
            same_scale = _check_e8m0_scales(rank, scales, expected.scales.cpu(), bounds)
            same_scale = same_scale.repeat_interleave(expected.fmt.block, dim=-1)
    if steps.numel() == 0:
        return
    most = int((steps * ~same_scale).max())
    assert most <= bounds.code_steps, f"rank {rank}: an A2 code under another scale is {most} steps off"
    far, limit = int(((steps > 1) & same_scale).sum()), math.ceil(bounds.far_fraction * steps.numel())
    assert far <= limit, f"rank {rank}: {far} A2 codes are up to {int(steps.max())} steps off; the bound is {limit}"
    changed = int((steps.ne(0) & same_scale).sum())
    most_changed = max(bounds.code_fraction * steps.numel(), FEW)
    assert changed <= most_changed, (
        f"rank {rank}: {changed} of {steps.numel()} A2 codes differ, above {most_changed:.0f}"
    )


def _code_steps(got: Quantized, expected: Quantized, order: Tensor) -> Tensor:
    """Steps between codes, `[rows, I]`; 0 where a value near zero moved by less than a 512th of its row's largest.

    GEMM1's error is absolute, and the codes of values near zero lie closer together than that.
    """
    ours = Quantized(
        payload=got.payload.cpu()[order],
        scales=None if got.scales is None else got.scales.cpu()[order],
        fmt=got.fmt,
    ).dequantize()
    theirs = expected.dequantize().cpu()
    steps = code_distance(got.payload.cpu()[order], expected.payload.cpu())
    largest = theirs.abs().amax(-1, keepdim=True)
    unimportant = (theirs.abs() < largest / 64) & ((ours - theirs).abs() <= largest / 512)
    return steps.masked_fill(unimportant, 0)


def _check_fp32_scales(rank: int, got: Tensor, expected: Tensor, bounds: StagedBounds) -> None:
    distance = ((got - expected).abs() / expected).amax().item() if expected.numel() else 0.0
    assert distance <= bounds.scale_rel, f"rank {rank}: an A2 scale is {distance:.2%} off; bound {bounds.scale_rel:.2%}"


def _check_e8m0_scales(rank: int, got: Tensor, expected: Tensor, bounds: StagedBounds) -> Tensor:
    """Returns which scales are equal."""
    steps = (got.int() - expected.int()).abs()
    if steps.numel():
        most, changed = int(steps.max()), int(steps.ne(0).sum())
        assert most <= bounds.scale_steps, f"rank {rank}: an A2 scale is {most} powers of two off"
        limit = max(bounds.code_fraction * steps.numel(), FEW)
        assert changed <= limit, f"rank {rank}: {changed} of {steps.numel()} A2 scales differ; the bound is {limit:.0f}"
    return steps.eq(0)


def _matching_rows(rank: int, got: StageTaps, expected: StageTaps) -> Tensor:
    """Rows of `got` in the order of `expected`: within an expert, the order of rows is the backend's own."""

    def keys(taps: StageTaps) -> Tensor:
        expert, src, pick = (part.cpu().long() for part in (taps.local_expert, taps.src_rank, taps.src_pick))
        return (expert << 48) | (src << 32) | pick

    ours, theirs = keys(got), keys(expected)
    order_of_ours, order_of_theirs = ours.argsort(), theirs.argsort()
    assert torch.equal(ours[order_of_ours], theirs[order_of_theirs]), (
        f"rank {rank}: the pool holds other rows than were sent"
    )
    order = torch.empty_like(order_of_ours)
    order[order_of_theirs] = order_of_ours
    return order


def _joined(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    device = expected[0].device
    return torch.cat([y.to(device) for y in outputs]).float(), torch.cat(list(expected)).float()


def _check_rows(got: Tensor, expected: Tensor, limit: float, what: str, outputs: Sequence[Tensor]) -> None:
    rows = row_rel_l2(got, expected)
    if rows.numel() == 0:
        return
    worst = int(rows.argmax())
    distance = rows[worst].item()
    if distance >= limit:
        rank = 0
        while worst >= outputs[rank].shape[0]:
            worst -= outputs[rank].shape[0]
            rank += 1
        raise AssertionError(f"row {worst} of rank {rank}: relL2 {distance:.4g} from {what}; the bound is {limit}")


def _num_tokens(call: Call) -> int:
    return call.num_rows if call.num_tokens is None else int(call.num_tokens)


def _first(mask: Tensor, limit: int = 8) -> list[int]:
    found: list[int] = mask.nonzero().flatten()[:limit].tolist()
    return found

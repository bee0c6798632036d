"""Gate/up orders by hand, by formula, and against the ways in which they get mixed up."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe.errors import LayoutError
from megamoe.layouts import ALTERNATING, BLOCKS_16, INTERLEAVED_8, PACKED, GateUpOrder, LaidOut, Layout

ORDERS = [ALTERNATING, INTERLEAVED_8, BLOCKS_16]
ALL = [PACKED, *ORDERS]


def by_name(layout: object) -> str:
    assert isinstance(layout, Layout)
    return layout.name


def labelled(num_experts: int, intermediate_size: int) -> torch.Tensor:
    """Packed `[E, 2I, 1]`: gate channel c of expert e is 10000 e + c, up channel c the negative of that, less 1."""
    gate = 10000 * torch.arange(num_experts)[:, None] + torch.arange(intermediate_size)
    return torch.cat((gate, -gate - 1), dim=1).unsqueeze(-1)


def test_interleaved_8_by_hand() -> None:
    rows = INTERLEAVED_8.apply(labelled(1, 16)).flatten().tolist()
    gates, ups = list(range(16)), [-channel - 1 for channel in range(16)]
    assert rows == gates[:8] + ups[:8] + gates[8:] + ups[8:]


def test_alternating_by_hand() -> None:
    """gpt-oss: gate0, up0, gate1, up1, …"""
    assert ALTERNATING.apply(labelled(1, 3)).flatten().tolist() == [0, -1, 1, -2, 2, -3]
    assert ALTERNATING.invert(torch.tensor([[10, 20, 11, 21, 12, 22]])).tolist() == [[10, 11, 12, 20, 21, 22]]


def test_blocks_16_by_formula() -> None:
    """Channel 32J + 8g + 4b + r at row 64J + 32b + 4g + r, its up 16 rows later."""
    rows = BLOCKS_16.apply(labelled(1, 96)).flatten().tolist()
    for j in range(3):
        for g in range(4):
            for b in range(2):
                for r in range(4):
                    channel, row = 32 * j + 8 * g + 4 * b + r, 64 * j + 32 * b + 4 * g + r
                    assert rows[row] == channel
                    assert rows[row + 16] == -channel - 1


def test_blocks_16_gives_a_lane_eight_whole_channels() -> None:
    """Lane group g holds rows 4g to 4g + 3 of each 16-row operand: channels 8g to 8g + 7, gates and ups."""
    operands = BLOCKS_16.apply(labelled(1, 32)).view(4, 16)
    for g in range(4):
        gate0, up0, gate1, up1 = operands[:, 4 * g : 4 * g + 4]
        channels = torch.arange(8 * g, 8 * g + 8)
        assert torch.equal(torch.cat((gate0, gate1)), channels)
        assert torch.equal(torch.cat((up0, up1)), -channels - 1)


def test_interleaved_8_gives_a_tile_of_256_rows_128_whole_channels() -> None:
    tile = INTERLEAVED_8.apply(labelled(1, 256))[0, :256, 0]
    assert sorted(tile.tolist()) == list(range(-128, 128))


@given(
    order=st.sampled_from(ORDERS),
    num_experts=st.integers(0, 3),
    periods=st.integers(1, 4),
    num_columns=st.integers(1, 3),
)
def test_round_trip(order: GateUpOrder, num_experts: int, periods: int, num_columns: int) -> None:
    shape = (num_experts, 2 * periods * order.period, num_columns)
    w13 = torch.arange(shape[0] * shape[1] * shape[2]).view(shape)
    there = order.apply(w13)
    assert there.shape == shape
    assert torch.equal(order.invert(there), w13)
    assert torch.equal(order.apply(order.invert(w13)), w13)


@pytest.mark.parametrize("order", ORDERS, ids=by_name)
def test_rows_are_a_permutation(order: GateUpOrder) -> None:
    rows = order.rows(96)
    assert sorted(rows.tolist()) == list(range(192))
    w13 = labelled(1, 96)
    assert torch.equal(order.apply(w13)[0, rows], w13[0])


@pytest.mark.parametrize("layout", ALL, ids=by_name)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16])
def test_no_bit_changes(layout: Layout, dtype: torch.dtype) -> None:
    """NaN payloads and negative zeros included."""
    raw = torch.arange(2 * 64 * 4 * dtype.itemsize).to(torch.uint8).view(2, 64, 4 * dtype.itemsize)
    got = layout.apply(raw.view(dtype))
    assert got.dtype == dtype
    assert torch.equal(got.contiguous().view(torch.uint8), layout.apply(raw))


@pytest.mark.parametrize("layout", ALL, ids=by_name)
def test_scales_and_biases_go_with_their_rows(layout: Layout) -> None:
    w13 = labelled(3, 32)
    assert torch.equal(layout.apply(w13.squeeze(-1)), layout.apply(w13).squeeze(-1))
    assert torch.equal(layout.apply(w13.expand(-1, -1, 5)), layout.apply(w13).expand(-1, -1, 5))


@pytest.mark.parametrize("layout", ALL, ids=by_name)
def test_experts_can_move_in_place(layout: Layout) -> None:
    """Copying a slot over another is the same before and after `apply`."""
    w13 = labelled(4, 32)
    laid_out = layout.apply(w13).clone()
    laid_out[1].copy_(laid_out[3])
    w13[1] = w13[3]
    assert torch.equal(laid_out, layout.apply(w13))


@pytest.mark.parametrize("order", ORDERS, ids=by_name)
def test_orders_are_not_each_other(order: GateUpOrder) -> None:
    """A mix-up changes the result: no order maps to another by accident at a common size."""
    w13 = labelled(1, 64)
    for other in ALL:
        if other is not order:
            assert not torch.equal(other.invert(order.apply(w13)), w13)


@pytest.mark.parametrize("order, bad_size", [(INTERLEAVED_8, 12), (BLOCKS_16, 48)], ids=["interleaved_8", "blocks_16"])
def test_sizes_that_do_not_fit_are_refused(order: GateUpOrder, bad_size: int) -> None:
    with pytest.raises(LayoutError, match=f"I a multiple of {order.period}"):
        order.apply(labelled(1, bad_size))
    with pytest.raises(LayoutError, match=f"can't be in layout {order.name}"):
        order.invert(torch.zeros(32))
    assert order.why_not((1, 2 * bad_size), torch.uint8) is not None
    assert order.why_not((1, 2 * order.period), torch.uint8) is None


def test_odd_number_of_rows_is_refused() -> None:
    with pytest.raises(LayoutError, match="I a multiple of 1"):
        ALTERNATING.apply(torch.zeros(1, 3, 2))


@pytest.mark.parametrize("source", ALL, ids=by_name)
@pytest.mark.parametrize("target", ALL, ids=by_name)
def test_conversion(source: Layout, target: Layout) -> None:
    w13 = labelled(2, 64)
    converted = LaidOut(tensor=source.apply(w13), layout=source).to(target)
    assert converted.layout == target
    assert torch.equal(converted.require(target), target.apply(w13))

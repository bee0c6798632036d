"""Preshuffle and scale shuffle against their formulas, byte by byte; composition; tags."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe.errors import LayoutError
from megamoe.layouts import (
    BLOCKS_16,
    INTERLEAVED_8,
    PACKED,
    PRESHUFFLE_16X16,
    ROW_MAJOR,
    SCALE_SHUFFLE,
    Composed,
    LaidOut,
    Layout,
)

W13 = Composed(layouts=(BLOCKS_16, PRESHUFFLE_16X16))
W13_SCALE = Composed(layouts=(BLOCKS_16, SCALE_SHUFFLE))
ALL = [PACKED, ROW_MAJOR, INTERLEAVED_8, BLOCKS_16, PRESHUFFLE_16X16, SCALE_SHUFFLE, W13, W13_SCALE]


def by_name(layout: object) -> str:
    assert isinstance(layout, Layout)
    return layout.name


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def preshuffle_offset(n: int, b: int, num_bytes: int) -> int:
    return (n // 16) * 16 * num_bytes + (b // 16) * 256 + (n % 16) * 16 + b % 16


def scale_offset(r: int, kb: int, k: int) -> int:
    return (r // 32) * k + (kb // 8) * 256 + (kb % 4) * 64 + (r % 16) * 4 + ((r // 16) % 2) * 2 + (kb // 4) % 2


def test_preshuffle_by_formula() -> None:
    weights = random_bytes(2, 48, 64)
    shuffled = PRESHUFFLE_16X16.apply(weights)
    assert shuffled.is_contiguous()
    for expert in range(2):
        flat = shuffled[expert].flatten()
        for n in range(48):
            offsets = [preshuffle_offset(n, b, 64) for b in range(64)]
            assert torch.equal(flat[offsets], weights[expert, n])


def test_scale_shuffle_by_formula() -> None:
    scales = random_bytes(2, 96, 16)  # K = 512
    shuffled = SCALE_SHUFFLE.apply(scales)
    assert shuffled.is_contiguous()
    for expert in range(2):
        flat = shuffled[expert].flatten()
        for r in range(96):
            offsets = [scale_offset(r, kb, 512) for kb in range(16)]
            assert torch.equal(flat[offsets], scales[expert, r])


def test_a_lane_reads_its_four_scales_as_one_dword() -> None:
    scales = torch.arange(256).to(torch.uint8).view(32, 8)
    dwords = SCALE_SHUFFLE.apply(scales).view(64, 4)
    for lane in range(64):
        r, kb = lane % 16, lane // 16
        expected = [scales[r, kb], scales[r, kb + 4], scales[r + 16, kb], scales[r + 16, kb + 4]]
        assert dwords[lane].tolist() == [int(scale) for scale in expected]


@given(
    layout=st.sampled_from([PRESHUFFLE_16X16, SCALE_SHUFFLE, W13, W13_SCALE]),
    num_experts=st.integers(0, 3),
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
)
def test_round_trip(layout: Layout, num_experts: int, rows: int, columns: int) -> None:
    tensor = random_bytes(num_experts, 64 * rows, 16 * columns)
    there = layout.apply(tensor)
    assert there.shape == tensor.shape
    assert torch.equal(layout.invert(there), tensor)
    assert torch.equal(layout.apply(layout.invert(tensor)), tensor)


@pytest.mark.parametrize("layout", ALL, ids=by_name)
def test_experts_can_move_in_place(layout: Layout) -> None:
    tensor = random_bytes(4, 64, 16)
    laid_out = layout.apply(tensor).clone()
    laid_out[0].copy_(laid_out[2])
    tensor[0] = tensor[2]
    assert torch.equal(laid_out, layout.apply(tensor))


@pytest.mark.parametrize("layout", [PRESHUFFLE_16X16, SCALE_SHUFFLE], ids=by_name)
def test_activations_have_no_expert_dimension(layout: Layout) -> None:
    tensor = random_bytes(3, 64, 16)
    assert torch.equal(layout.apply(tensor[1]), layout.apply(tensor)[1])
    assert torch.equal(layout.apply(tensor.unsqueeze(0)), layout.apply(tensor).unsqueeze(0))


def test_float8_goes_as_bytes() -> None:
    tensor = random_bytes(1, 64, 16)
    shuffled = PRESHUFFLE_16X16.apply(tensor.view(torch.float8_e4m3fn))
    assert shuffled.dtype == torch.float8_e4m3fn
    assert torch.equal(shuffled.view(torch.uint8), PRESHUFFLE_16X16.apply(tensor))
    scales = SCALE_SHUFFLE.apply(tensor.view(torch.float8_e8m0fnu))
    assert torch.equal(scales.view(torch.uint8), SCALE_SHUFFLE.apply(tensor))


def test_strides_do_not_matter() -> None:
    tensor = random_bytes(2, 16, 64).transpose(1, 2)
    for layout in ALL:
        assert torch.equal(layout.apply(tensor), layout.apply(tensor.contiguous()))
        assert torch.equal(layout.invert(tensor), layout.invert(tensor.contiguous()))


@pytest.mark.parametrize(
    "layout, shape",
    [
        (PRESHUFFLE_16X16, (1, 24, 32)),
        (PRESHUFFLE_16X16, (1, 32, 24)),
        (PRESHUFFLE_16X16, (32,)),
        (SCALE_SHUFFLE, (1, 48, 8)),
        (SCALE_SHUFFLE, (1, 32, 12)),
        (SCALE_SHUFFLE, (32,)),
        (W13, (1, 96, 16)),
        (W13, (1, 64, 24)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(layout: Layout, shape: tuple[int, ...]) -> None:
    for move in (layout.apply, layout.invert):
        with pytest.raises(LayoutError, match="can't be in layout"):
            move(torch.zeros(shape, dtype=torch.uint8))
    assert layout.why_not((1, 64, 16), torch.uint8) is None


@pytest.mark.parametrize("layout", [PRESHUFFLE_16X16, SCALE_SHUFFLE], ids=by_name)
def test_wider_items_are_refused(layout: Layout) -> None:
    """The formulas count bytes; a BF16 weight in them would be another layout under the same name."""
    with pytest.raises(LayoutError, match="expected bytes"):
        layout.apply(torch.zeros(1, 64, 16, dtype=torch.bfloat16))


def test_composition_applies_the_first_first() -> None:
    tensor = random_bytes(2, 64, 32)
    assert torch.equal(W13.apply(tensor), PRESHUFFLE_16X16.apply(BLOCKS_16.apply(tensor)))
    assert not torch.equal(W13.apply(tensor), BLOCKS_16.apply(PRESHUFFLE_16X16.apply(tensor)))
    assert W13.name == "blocks_16+preshuffle_16x16"


@pytest.mark.parametrize("wanted", ALL, ids=by_name)
@pytest.mark.parametrize("held", ALL, ids=by_name)
def test_a_wrong_tag_is_refused(held: Layout, wanted: Layout) -> None:
    laid_out = LaidOut(tensor=random_bytes(1, 64, 16), layout=held)
    if held is wanted:
        assert laid_out.require(wanted) is laid_out.tensor
        return
    with pytest.raises(LayoutError) as raised:
        laid_out.require(wanted)
    assert raised.value.got == held.name
    assert raised.value.expected == wanted.name
    assert raised.value.hint is not None
    assert "convert" in raised.value.hint


@pytest.mark.parametrize("target", ALL, ids=by_name)
def test_conversion_goes_through_the_checkpoint_order(target: Layout) -> None:
    tensor = random_bytes(2, 64, 16)
    converted = LaidOut(tensor=W13.apply(tensor), layout=W13).to(target)
    assert torch.equal(converted.require(target), target.apply(tensor))


def test_conversion_to_its_own_layout_copies_nothing() -> None:
    laid_out = LaidOut(tensor=random_bytes(1, 64, 16), layout=W13)
    assert laid_out.to(Composed(layouts=(BLOCKS_16, PRESHUFFLE_16X16))) is laid_out


@pytest.mark.parametrize("layout", ALL, ids=by_name)
def test_tags_survive_pickling(layout: Layout) -> None:
    """Tags travel to other processes with the weights they describe."""
    again = pickle.loads(pickle.dumps(layout))  # noqa: S301
    assert again == layout
    assert hash(again) == hash(layout)
    assert [other for other in ALL if other == again] == [layout]

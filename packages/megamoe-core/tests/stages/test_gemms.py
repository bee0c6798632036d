"""The products: values, where biases and router weights go, and that a row's bits are its own."""

from __future__ import annotations

import pytest
import torch

from megamoe.stages import multiply as multiply_module
from megamoe.stages.gemm1 import gemm1
from megamoe.stages.gemm2 import gemm2
from megamoe.stages.multiply import MAX_ROWS, ROW_TILE, fixed_arithmetic, heights_agree, multiply, pad_rows

SHAPES = [(64, 32), (512, 256), (256, 320), (1024, 768)]  # N, K


def operands(rows: int, num_columns: int, depth: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, depth, generator=generator), torch.randn(num_columns, depth, generator=generator)


def test_gemm1_adds_its_bias() -> None:
    x, w13 = operands(ROW_TILE, 6, 8)
    bias = torch.arange(6.0)
    torch.testing.assert_close(gemm1(x, w13, bias), x @ w13.T + bias)
    torch.testing.assert_close(gemm1(x, w13, None), x @ w13.T)


def test_gemm2_weighs_after_the_bias() -> None:
    a2, w2 = operands(ROW_TILE, 8, 6)
    bias, weights = torch.arange(8.0), torch.linspace(-1, 1, ROW_TILE)
    torch.testing.assert_close(gemm2(a2, w2, bias, weights), (a2 @ w2.T + bias) * weights[:, None])
    torch.testing.assert_close(gemm2(a2, w2, None, weights), (a2 @ w2.T) * weights[:, None])


@pytest.mark.parametrize("num_columns, depth", SHAPES)
def test_a_row_has_the_same_bits_wherever_it_stands(num_columns: int, depth: int) -> None:
    """Any position, any neighbours, any number of rows: one bit more or less would break batch invariance."""
    rows, weight = operands(4 * MAX_ROWS + ROW_TILE, num_columns, depth)
    with fixed_arithmetic():
        together = multiply(rows, weight)
        for index in (0, 1, 31, 32, 100, 127, 128, 300, len(rows) - 1):
            alone = multiply(pad_rows(rows[index : index + 1]), weight)
            assert torch.equal(alone[0], together[index])
        for shift in (1, 7, 32, 100):
            assert torch.equal(multiply(rows.roll(shift, 0), weight), together.roll(shift, 0))


@pytest.mark.parametrize("num_columns, depth", SHAPES[:2])
def test_a_blas_that_depends_on_the_height_gets_one_height(
    num_columns: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, weight = operands(MAX_ROWS + ROW_TILE, num_columns, depth)
    monkeypatch.setattr(multiply_module, "heights_agree", lambda *_: False)
    with fixed_arithmetic():
        torch.testing.assert_close(multiply(rows, weight), rows @ weight.T)
        padded = torch.cat((rows[MAX_ROWS:], torch.zeros(MAX_ROWS - ROW_TILE, depth)))
        assert torch.equal(multiply(rows, weight)[MAX_ROWS:], (padded @ weight.T)[:ROW_TILE])


@pytest.mark.parametrize("error", [0.0, 1e-4])
def test_the_check_of_the_blas_sees_bits_that_depend_on_the_height(
    error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    matmul = torch.Tensor.__matmul__
    full = torch.randn(MAX_ROWS, 64)

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert matmul(rows, weight).shape == (len(rows), 64)
        return full[-len(rows) :] + error * (len(rows) == 3 * ROW_TILE)

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    assert heights_agree.__wrapped__(64, 32) == (error == 0)


def test_fixed_arithmetic_restores_the_callers_settings() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with fixed_arithmetic():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_products_stay_fp32_until_the_last_thread_has_left() -> None:
    """`set_float32_matmul_precision` is the process's: a thread that leaves must not give the others BF16 products."""
    matmul = torch.backends.mkldnn.matmul
    torch.set_float32_matmul_precision("medium")
    try:
        callers = matmul.fp32_precision
        with fixed_arithmetic():
            with fixed_arithmetic():
                pass
            assert matmul.fp32_precision == "ieee" != callers
        assert matmul.fp32_precision == callers
    finally:
        torch.set_float32_matmul_precision("highest")


def test_padding() -> None:
    assert pad_rows(torch.ones(ROW_TILE, 3)).shape == (ROW_TILE, 3)
    padded = pad_rows(torch.ones(ROW_TILE + 1, 3))
    assert padded.shape == (2 * ROW_TILE, 3)
    assert not padded[ROW_TILE + 1 :].any()

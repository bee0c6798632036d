"""The checks of a call's arguments that the sessions of all backends share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megamoe.call_checks import (
    ARGUMENTS,
    by_rank,
    check_call,
    of_each,
    overlaps,
    require_aligned,
    require_ids,
    require_own_memory,
    valid_rows,
)
from megamoe.errors import CapacityError, InputError
from megamoe.formats import FP8_1X128, MXFP8
from megamoe.problem import MoEProblem
from megamoe.tensors import PreparedWeights

H, K, CAPACITY = 256, 2, 8
CPU = torch.device("cpu")


def problem(**fields: Any) -> MoEProblem:
    return MoEProblem(
        hidden_size=H, intermediate_size=128, num_experts=4, top_k=K, num_max_tokens_per_rank=CAPACITY, **fields
    )


def call(num_tokens: int = 5, **changes: Any) -> dict[str, Any]:
    return {
        "hidden_states": torch.zeros(num_tokens, H, dtype=torch.bfloat16),
        "topk_ids": torch.zeros(num_tokens, K, dtype=torch.int64),
        "topk_weights": torch.zeros(num_tokens, K),
        "out": None,
        **changes,
    }


def check(arguments: dict[str, Any], *, mxfp8: bool = False) -> int:
    return check_call(problem(quant="a8w4" if mxfp8 else "a8w8"), **arguments, device=CPU)


@pytest.mark.parametrize("num_tokens", [0, 1, CAPACITY])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_good_calls(num_tokens: int, ids: torch.dtype) -> None:
    out = torch.empty(num_tokens, H, dtype=torch.bfloat16)
    arguments = call(num_tokens, topk_ids=torch.zeros(num_tokens, K, dtype=ids), out=out)
    assert check(arguments) == num_tokens


def test_over_capacity() -> None:
    with pytest.raises(CapacityError, match=r"got 9; expected at most num_max_tokens_per_rank = 8.*larger capacity"):
        check(call(CAPACITY + 1))


@pytest.mark.parametrize(
    "name, value, match",
    [
        ("hidden_states", torch.zeros(5, H), "hidden_states has the wrong dtype; got torch.float32.*bfloat16"),
        ("hidden_states", torch.zeros(5, H - 1, dtype=torch.bfloat16), r"wrong shape; got \(5, 255\); expected"),
        ("hidden_states", torch.zeros(H, dtype=torch.bfloat16), "hidden_states is not a matrix"),
        ("topk_ids", torch.zeros(5, K, dtype=torch.int16), "topk_ids has the wrong dtype; got torch.int16.*int32 or"),
        ("topk_ids", torch.zeros(4, K, dtype=torch.int64), "topk_ids has the wrong shape"),
        ("topk_ids", torch.zeros(5, K + 1, dtype=torch.int64), "topk_ids has the wrong shape"),
        ("topk_weights", torch.zeros(5, K, dtype=torch.bfloat16), "topk_weights has the wrong dtype"),
        ("topk_weights", torch.zeros(5), "topk_weights has the wrong shape"),
        ("out", torch.zeros(5, H), "out has the wrong dtype"),
        ("out", torch.zeros(6, H, dtype=torch.bfloat16), "out has the wrong shape"),
        ("out", torch.zeros(H, 5, dtype=torch.bfloat16).t(), "out is not contiguous"),
        ("topk_ids", torch.zeros(5, K, dtype=torch.int64, device="meta"), "several devices.*cpu.*meta"),
    ],
)  # fmt: skip
def test_bad_calls(name: str, value: torch.Tensor, match: str) -> None:
    with pytest.raises(InputError, match=match):
        check(call(**{name: value}))


@pytest.mark.parametrize("name", ["hidden_states", "topk_weights"])
def test_what_requires_grad_is_refused_in_grad_mode_only(name: str) -> None:
    """There is no backward, and a residual beside the layer would hide that its part of the gradient is missing."""
    differentiable = call(**{name: call()[name].requires_grad_()})
    with pytest.raises(InputError, match=f"there is no backward; got {name} that require grad; expected .*no_grad"):
        check(differentiable)
    for without in (torch.no_grad(), torch.inference_mode()):
        with without:
            assert check(differentiable) == 5


def test_tensors_overlap_where_they_share_bytes() -> None:
    memory = torch.zeros(8, 4)
    assert overlaps(memory, memory)
    assert overlaps(memory[:5], memory[4:])
    assert overlaps(memory, memory.view(torch.uint8)[7:])
    assert not overlaps(memory[:4], memory[4:])
    assert not overlaps(memory[4:], memory[:4])
    assert overlaps(memory[:, :2], memory[7:, 1:])  # strided: to its last element
    assert not overlaps(memory[:4, :2], memory[4:])
    assert not overlaps(memory[4:4], memory)


def test_an_address_that_kernels_can_not_read_is_named() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    first = -memory.data_ptr() % 16
    require_aligned("out", memory[first : first + 16], 16)
    with pytest.raises(InputError, match="out is not aligned to 16 bytes; got 0x[0-9a-f]*2; expected a multiple of 16"):
        require_aligned("out", memory[first + 2 :], 16)


def test_quantised_input() -> None:
    quantized = FP8_1X128.quantize(torch.randn(5, H, generator=torch.Generator().manual_seed(0)))
    assert check(call(hidden_states=quantized)) == 5
    assert check(call(hidden_states=(quantized.payload, quantized.scales))) == 5
    assert quantized.scales is not None
    for payload, scales, match in (
        (quantized.payload.view(torch.uint8), quantized.scales, "payload has the wrong dtype"),
        (quantized.payload[:, :-1], quantized.scales, "payload has the wrong shape"),
        (quantized.payload, quantized.scales[:, :1], "scales has the wrong shape"),
        (quantized.payload, quantized.scales[:4], "scales has the wrong shape"),
        (quantized.payload, quantized.scales.double(), "scales has the wrong dtype"),
    ):
        with pytest.raises(InputError, match=match):
            check(call(hidden_states=(payload, scales)))


@pytest.mark.parametrize(
    "changes, says",
    [
        (
            {"topk_ids": torch.zeros(5, 1, dtype=torch.int64)},
            r"got \(5, 1\); expected \(5, 2\), which is \[T, top_k\]; T is the number of rows of hidden_states",
        ),
        ({"hidden_states": torch.zeros(5, H)}, r"cast with .to\(torch.bfloat16\)"),
        ({"topk_ids": torch.zeros(5, K, dtype=torch.int16)}, r"cast with .to\(torch.int64\)"),
        (
            {"hidden_states": (torch.zeros(5, H), torch.zeros(5, 2))},
            "payload.*quantise to the mode's format, or pass BF16",
        ),
        ({"out": torch.zeros(5, H)}, "out has the wrong dtype.*; leave out=None to have it made"),
    ],
)
def test_a_refusal_says_which_dimension_is_which_and_what_to_do(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        check(call(**changes))


def prepared(*w2_bias: torch.Tensor) -> PreparedWeights:
    return PreparedWeights.of(problem(), backend="", layout="", tensors=dict(zip(("w2_bias",), w2_bias)))


def at(memory: torch.Tensor, first_byte: int, like: torch.Tensor) -> torch.Tensor:
    """Memory of bytes from `first_byte` on, with the shape and dtype of `like`."""
    return memory[first_byte : first_byte + like.nbytes].view(like.dtype).view(like.shape)


class Wrapper(torch.Tensor):
    """Its elements are somewhere else, as a DTensor's are."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return make(cls, like.shape, dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise AssertionError("nothing is asked of it but its facts")


def test_arguments_are_where_the_session_computes() -> None:
    elsewhere = {name: value if value is None else value.to("meta") for name, value in call().items()}
    with pytest.raises(InputError, match="arguments on another device; got meta; expected cpu"):
        check(elsewhere)
    with pytest.raises(InputError, match=r"arguments on several devices; got \['cpu', 'meta'\]"):
        check(call(topk_ids=elsewhere["topk_ids"]))


@pytest.mark.parametrize("name", ["hidden_states", "topk_ids", "topk_weights", "out"])
def test_a_tensor_without_elements_at_its_address_is_refused(name: str) -> None:
    """A kernel would read from address 0."""
    good = call(out=torch.zeros(5, H, dtype=torch.bfloat16))
    assert check({**good, name: torch.nn.Parameter(good[name], requires_grad=False)}) == 5
    for value in (Wrapper(good[name]), good[name].to_sparse()):
        with pytest.raises(InputError, match=rf"{name} does not hold its elements.*to_local\(\)"):
            check({**good, name: value})


def test_an_output_lies_over_no_argument_but_bf16_tokens() -> None:
    tokens, ids, router = (call()[name] for name in ("hidden_states", "topk_ids", "topk_weights"))
    count, scales = torch.zeros((), dtype=torch.int32), torch.zeros(5, 2)
    memory = torch.zeros(3 * tokens.nbytes, dtype=torch.uint8)
    out = at(memory, tokens.nbytes, tokens)
    last = 2 * tokens.nbytes  # the first byte behind
    for x in (tokens, out, at(memory, tokens.nbytes // 2, tokens)):
        for picks in (
            ids,
            at(memory, last, ids),
            at(memory, tokens.nbytes - ids.nbytes, ids),
            out.view(torch.int64)[:0],
        ):
            require_own_memory(out, x, picks, router, prepared(), 5)
    payload = torch.zeros(5, H, dtype=torch.float8_e4m3fn)
    apart = prepared(torch.zeros(8))
    require_own_memory(out, (payload, scales), ids, router, apart, count)
    for name, arguments in {
        "topk_ids": (tokens, at(memory, last - 8, ids), router, apart, None),
        "topk_weights": (tokens, ids, at(memory, tokens.nbytes - 8, router), apart, None),
        "w2_bias": (tokens, ids, router, prepared(at(memory, last - 8, torch.zeros(4))), None),
        "num_tokens": (tokens, ids, router, apart, at(memory, tokens.nbytes + 8, count)),
        "hidden_states payload": ((at(memory, tokens.nbytes, payload), scales), ids, router, apart, 5),
        "hidden_states scales": ((payload, at(memory, tokens.nbytes, scales)), ids, router, apart, 5),
    }.items():
        with pytest.raises(InputError, match=f"out shares memory with {name}; got out from 0x"):
            require_own_memory(out, *arguments)


def test_a_virtual_ranks_arguments_are_refused_with_its_number() -> None:
    def check(index: int, value: int) -> int:
        if value < 0:
            raise InputError("negative", got=value)
        return index + value

    assert of_each(check, [(3,), (4,)], virtual=True) == [3, 5]
    with pytest.raises(InputError, match="^virtual rank 1: negative; got -4"):
        of_each(check, [(3,), (-4,)], virtual=True)
    with pytest.raises(InputError, match="^negative"):
        of_each(check, [(-3,)], virtual=False)


def test_e8m0_scales_are_bytes_of_either_name() -> None:
    quantized = MXFP8.quantize(torch.randn(5, H, generator=torch.Generator().manual_seed(0)))
    assert quantized.scales is not None
    for scales in (quantized.scales, quantized.scales.view(torch.float8_e8m0fnu)):
        assert check(call(hidden_states=(quantized.payload, scales)), mxfp8=True) == 5
    with pytest.raises(InputError, match="scales has the wrong dtype; got torch.int8"):
        check(call(hidden_states=(quantized.payload, quantized.scales.view(torch.int8))), mxfp8=True)


def test_a_mode_without_scales_takes_no_pair() -> None:
    pair = (torch.zeros(5, H, dtype=torch.bfloat16), torch.ones(5, 1))
    with pytest.raises(InputError, match="mode bf16 has no activation scales"):
        check_call(problem(quant="bf16"), **call(hidden_states=pair), device=CPU)


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize(
    "value, got",
    [
        (torch.zeros(2, 3), "Tensor"),
        (FP8_1X128.quantize(torch.zeros(2, 128)), "Quantized"),
        (2, "int"),
        ("ab", "str"),
        ([torch.zeros(2)], "1 entries"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_with_virtual_ranks_what_is_no_list_of_an_entry_each_is_named(name: str, value: Any, got: str) -> None:
    columns = [value if name == each else [each, each] for each in ARGUMENTS]
    with pytest.raises(InputError, match=f"^{name} is not one entry per virtual rank; got {got}; expected a list of 2"):
        by_rank(columns, 2)


def test_with_virtual_ranks_each_gets_its_entries_and_none_is_none_of_each() -> None:
    columns = [[f"{name} of 0", f"{name} of 1"] for name in ARGUMENTS[:4]]
    assert by_rank([*columns, None, (3, 4)], 2) == [
        (*(f"{name} of 0" for name in ARGUMENTS[:4]), None, 3),
        (*(f"{name} of 1" for name in ARGUMENTS[:4]), None, 4),
    ]


def test_with_virtual_ranks_each_writes_memory_of_its_own() -> None:
    memory = torch.zeros(10, H, dtype=torch.bfloat16)

    def rows(*out: torch.Tensor | None) -> None:
        by_rank([*[[None] * 3] * 4, out, None], 3)

    rows(memory[:5], None, memory[5:])
    rows(memory[:5], memory[5:5], memory[5:])
    with pytest.raises(InputError, match="out of virtual ranks 0 and 2 share memory"):
        rows(memory, None, memory)
    with pytest.raises(InputError, match="out of virtual ranks 1 and 2 share memory"):
        rows(None, memory[:5], memory[4:9])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_no_expert_are_named(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, -1], [3, 4], [-2, 1]], dtype=dtype)
    require_ids(ids[:1], 4)
    with pytest.raises(InputError, match=r"topk_ids\[1, 1\] is no expert's id; got 4, and 1 more"):
        require_ids(ids, 4)


def test_rows_that_are_no_padding_are_counted_on_the_host_or_on_the_device() -> None:
    assert [valid_rows(count, 5, CPU) for count in (0, 5)] == [0, 5]
    scalar = torch.tensor(77, dtype=torch.int32)  # its value is the kernel's to look at
    assert valid_rows(scalar, 5, CPU) is scalar
    with pytest.raises(InputError, match="no device-side count; got .* on cpu; expected one int32 on cuda:1"):
        valid_rows(scalar, 5, torch.device("cuda", 1))


@pytest.mark.parametrize(
    "wrong, says",
    [
        (6, "out of range; got 6; expected 0 to 5"),
        (-1, "out of range"),
        (True, "no count; got True"),
        ("5", "no count; got '5'"),
        (2.0, "no count"),
        (torch.tensor(3), "no device-side count; got .* torch.int64"),
        (torch.zeros(2, dtype=torch.int32), r"no device-side count; got \(2,\)"),
    ],
    ids=str,
)
def test_what_counts_no_rows_is_refused(wrong: Any, says: str) -> None:
    with pytest.raises(InputError, match=f"num_tokens is {says}"):
        valid_rows(wrong, 5, CPU)

"""Errors say what was got, what was expected and what to do, and survive the way between processes."""

import pickle

import pytest

from megamoe import errors
from megamoe.errors import (
    CapacityError,
    ConfigError,
    InputError,
    MegaMoEError,
    MegaMoETimeoutError,
    ProtocolError,
    RankFailedError,
)

ALL = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


def test_message_holds_got_expected_and_hint() -> None:
    error = InputError("x has the wrong shape", got=(1, 2), expected=(3, 4), hint="transpose it")
    assert str(error) == "x has the wrong shape; got (1, 2); expected (3, 4); transpose it"
    assert (error.got, error.expected, error.hint) == ((1, 2), (3, 4), "transpose it")


def test_absent_parts_are_left_out() -> None:
    assert str(ConfigError("contradiction")) == "contradiction"
    assert str(ConfigError("too small", got=0)) == "too small; got 0"


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_one_root(cls: type[Exception]) -> None:
    """`except MegaMoEError` catches everything that is raised on purpose."""
    assert issubclass(cls, MegaMoEError)
    assert cls.__doc__


def test_over_capacity_is_an_input_error() -> None:
    assert issubclass(CapacityError, InputError)


def test_timeout_names_who_waited_for_whom() -> None:
    error = MegaMoETimeoutError(rank=1, peer=3, phase="dispatch", timeout_s=2.5, epoch=7, index=4)
    for part in ("rank 1", "rank 3", "2.5 s", "dispatch", "epoch 7", "index 4", "reset()", "MEGAMOE_TIMEOUT_S"):
        assert part in str(error)
    assert isinstance(error, ProtocolError)


@pytest.mark.parametrize(
    "error",
    [
        InputError("wrong", got=1, expected=2, hint="fix"),
        MegaMoETimeoutError(rank=1, peer=3, phase="combine", timeout_s=2.0, epoch=7, index=4, hint="look at rank 3"),
        RankFailedError("rank 2 failed", rank=0, peer=2),
    ],
    ids=lambda error: type(error).__name__,
)
def test_pickled_error_is_the_same(error: MegaMoEError) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - just made
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert copy.args == error.args

"""The table of flags, and the arithmetic of epochs."""

from dataclasses import replace

import pytest

from megamoe.errors import ConfigError
from megamoe.schedule.model_check.faults import FAULT_SHAPE
from megamoe.schedule.protocol import (
    FLAGS,
    PARITY_FLAGS,
    REGIONS,
    Call,
    Life,
    Scope,
    counter_flag,
    counter_word,
    counter_words,
    flag_words,
    initial_value,
    next_epoch,
    reached,
)

EDGE_EPOCHS = [1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 0]


def test_names_are_unique() -> None:
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)
    assert len({region.name for region in REGIONS}) == len(REGIONS)


def test_every_parity_word_has_its_place() -> None:
    places = {counter_word(f, i, FAULT_SHAPE): (f, i) for f in PARITY_FLAGS for i in range(flag_words(f, FAULT_SHAPE))}
    assert sorted(places) == list(range(counter_words(FAULT_SHAPE)))
    assert all(counter_flag(word, FAULT_SHAPE) == place for word, place in places.items())
    with pytest.raises(IndexError):
        counter_flag(counter_words(FAULT_SHAPE), FAULT_SHAPE)


def test_a_flag_that_peers_raise_has_system_scope_and_no_reset() -> None:
    """A counter can only be cleared when nobody can touch it, which holds for the rank's own workers alone."""
    assert {flag.life for flag in FLAGS if flag.scope is Scope.SYSTEM} == {Life.EPOCH}


@pytest.mark.parametrize("epoch", EDGE_EPOCHS)
def test_epochs_compare_by_signed_difference(epoch: int) -> None:
    assert reached(epoch, epoch)
    assert reached(next_epoch(epoch), epoch)
    assert not reached(next_epoch(epoch, -1), epoch)
    assert reached(next_epoch(epoch, 2**31 - 1), epoch)
    assert not reached(next_epoch(epoch, 2**31), epoch)


@pytest.mark.parametrize("epoch", EDGE_EPOCHS)
def test_initial_values_satisfy_no_first_wait(epoch: int) -> None:
    for flag in FLAGS:
        first_target = epoch if flag.life is Life.EPOCH else 1
        assert not reached(initial_value(flag, epoch), first_target)


def test_consecutive_epochs_use_different_copies() -> None:
    epochs = [2**32 - 2, 2**32 - 1, 0, 1]
    assert [Call(rank=0, epoch=epoch, num_tokens=0).parity for epoch in epochs] == [0, 1, 0, 1]
    assert [next_epoch(epoch) for epoch in epochs[:3]] == epochs[1:]


@pytest.mark.parametrize("field", ["ep_size", "num_ctas", "ring_blocks", "rows_per_pull", "block_m"])
def test_shape_refuses_zero(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(FAULT_SHAPE, **{field: 0})

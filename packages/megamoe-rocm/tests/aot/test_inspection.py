"""What is found in instructions: fences, cache bits, loops; on sequences written by hand."""

from __future__ import annotations

import pytest

from megamoe_rocm.aot.disassembly import Instruction, split_operands
from megamoe_rocm.aot.inspection import find_fences, main_loop, peer_stores, scope

WAIT = "s_waitcnt vmcnt(0)"
RELEASE = ("buffer_wbl2 sc0 sc1", WAIT, "global_atomic_add v0, v1, s[4:5] sc1")
ACQUIRE = ("global_atomic_add v0, v1, v2, s[4:5] sc0 sc1", WAIT, "buffer_inv sc0 sc1")


def sequence(*texts: str) -> tuple[Instruction, ...]:
    items = []
    for at, text in enumerate(texts):
        text, _, target = text.partition(" @")
        mnemonic, _, rest = text.partition(" ")
        operands, modifiers = split_operands(rest)
        word = (int(target) - at - 1) & 0xFFFF if target else 0
        items.append(
            Instruction(
                address=4 * at, mnemonic=mnemonic, operands=operands, modifiers=modifiers, words=(word,), text=text
            )
        )
    return tuple(items)


def counts(*texts: str, at_scope: str = "system") -> tuple[int, int, int, int]:
    found = find_fences(sequence(*texts), at_scope)
    return len(found.releases), len(found.acquires), len(found.polls), len(found.unfenced)


def test_a_release_and_an_acquire() -> None:
    assert counts(*RELEASE) == (1, 0, 0, 0)
    assert counts(*ACQUIRE) == (0, 1, 0, 0)
    assert counts(*RELEASE, *ACQUIRE) == (1, 1, 0, 0)


@pytest.mark.parametrize("dropped", [0, 1])
def test_a_release_that_lost_its_write_back_or_its_wait(dropped: int) -> None:
    rest = [text for at, text in enumerate(RELEASE) if at != dropped]
    assert counts(*rest) == (0, 0, 0, 1)


@pytest.mark.parametrize("dropped", [1, 2])
def test_an_acquire_that_lost_its_wait_or_its_invalidate(dropped: int) -> None:
    rest = [text for at, text in enumerate(ACQUIRE) if at != dropped]
    assert counts(*rest, "s_endpgm") == (0, 0, 1, 0)


@pytest.mark.parametrize(
    "texts",
    [
        ("buffer_wbl2 sc1", *RELEASE[1:]),  # to the device only
        (RELEASE[0], "s_waitcnt vmcnt(1)", RELEASE[2]),
        (WAIT, RELEASE[0], RELEASE[2]),  # the wait comes first
        (*RELEASE[:2], "global_store_dword v[2:3], v1, off", RELEASE[2]),  # a store behind the write-back
        (*RELEASE[:2], "s_barrier", RELEASE[2]),
    ],
)
def test_what_is_no_system_release(texts: tuple[str, ...]) -> None:
    assert counts(*texts)[0] == 0


@pytest.mark.parametrize(
    "texts",
    [
        (*ACQUIRE[:2], "buffer_inv sc1"),
        (ACQUIRE[0], "s_waitcnt lgkmcnt(0)", ACQUIRE[2]),
        (*ACQUIRE[:2], "global_load_dword v3, v[2:3], off", ACQUIRE[2]),  # a load before the invalidate
    ],
)
def test_what_is_no_system_acquire(texts: tuple[str, ...]) -> None:
    assert counts(*texts)[1] == 0


def test_agent_scope() -> None:
    release = ("buffer_wbl2 sc1", WAIT, "global_atomic_add v0, v1, s[4:5]")
    acquire = ("global_atomic_or v0, v1, v2, s[4:5] sc0", WAIT, "buffer_inv sc1")
    assert counts(*release, *acquire, at_scope="agent") == (1, 1, 0, 0)
    assert counts(*release, *acquire) == (0, 0, 0, 0)
    assert counts("global_atomic_add v0, v1, v2, s[4:5] sc0", WAIT, "s_endpgm", at_scope="agent") == (0, 0, 1, 0)


def test_a_released_store_and_a_polling_load() -> None:
    assert counts(*RELEASE[:2], "global_store_dword v1, v2, s[4:5] sc0 sc1") == (1, 0, 0, 0)
    assert counts("global_load_dword v1, v2, s[4:5] sc0 sc1", WAIT, "s_endpgm") == (0, 0, 1, 0)


def test_scopes_of_accesses() -> None:
    texts = (
        "global_store_dword v1, v2, s[4:5] sc0 sc1", "global_store_dword v1, v2, s[4:5] sc1",
        "global_store_dword v1, v2, s[4:5]",
        "global_atomic_add v1, v2, s[4:5] sc1", "global_atomic_add v0, v1, v2, s[4:5] sc0",
    )  # fmt: skip
    assert [scope(item) for item in sequence(*texts)] == ["system", "agent", "workgroup", "system", "agent"]
    assert len(peer_stores(sequence(*texts))) == 1


def test_the_main_loop_is_the_innermost_with_most_mfmas() -> None:
    mfma = "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[8:11], v[0:3], v12, v13 cbsz:4 blgp:4"
    items = sequence(
        mfma,
        "s_nop 0",
        mfma,
        "s_cbranch_scc1 @2",  # one
        mfma,
        mfma,
        "s_cbranch_scc1 @4",  # two
        "s_cbranch_scc0 @1",  # around both
        "s_endpgm",
    )
    assert [item.address for item in main_loop(items)] == [16, 20, 24]
    assert main_loop(sequence("s_nop 0", "s_cbranch_scc1 @0")) == ()

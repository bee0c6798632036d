"""Reading code objects: ELF, MessagePack, disassembly text, registers and occupancy."""

from __future__ import annotations

import struct

import pytest

from megamoe_rocm.aot import CodeObject, CodeObjectError, occupancy
from megamoe_rocm.aot.disassembly import parse_line
from megamoe_rocm.aot.elf import Elf
from megamoe_rocm.aot.msgpack import decode


@pytest.mark.parametrize(
    "data, value",
    [
        (b"\x07", 7),
        (b"\xff", -1),
        (b"\xcc\xff", 255),
        (b"\xcd\x01\x00", 256),
        (b"\xce\x00\x01\x00\x00", 65536),
        (b"\xd1\xff\x00", -256),
        (b"\xcb" + struct.pack(">d", 1.5), 1.5),
        (b"\xc0", None),
        (b"\xc3", True),
        (b"\xa3abc", "abc"),
        (b"\xd9\x01x", "x"),
        (b"\xc4\x02\x00\x01", b"\x00\x01"),
        (b"\x93\x01\x02\x03", [1, 2, 3]),
        (b"\xdc\x00\x01\xa1y", ["y"]),
        (b"\x82\xa1a\x01\xa1b\x91\xc2", {"a": 1, "b": [False]}),
        (b"\xde\x00\x01\xa1k\xcf\x00\x00\x00\x01\x00\x00\x00\x00", {"k": 1 << 32}),
    ],
)
def test_messagepack(data: bytes, value: object) -> None:
    assert decode(data) == value


@pytest.mark.parametrize("data", [b"", b"\xcd\x01", b"\x92\x01", b"\xc1", b"\xa1\xff"])
def test_bad_messagepack_is_an_error(data: bytes) -> None:
    with pytest.raises(CodeObjectError, match="metadata"):
        decode(data)


@pytest.mark.parametrize("data", [b"", b"MZ" + bytes(100), b"\x7fELF\x01\x01" + bytes(100)])
def test_what_is_no_elf_file_is_refused(data: bytes) -> None:
    with pytest.raises(CodeObjectError, match="ELF"):
        CodeObject.from_bytes(data, lds_bytes=0)


def test_an_elf_file_of_another_machine_is_refused() -> None:
    header = (
        b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, 64, 0, 64, 0, 0, 64, 0, 0)
    )
    with pytest.raises(CodeObjectError, match="another machine"):
        Elf(header)


def test_a_cut_off_section_table_is_refused() -> None:
    header = (
        b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 1, 224, 1, 0, 0, 64, 0, 64, 0, 0, 64, 3, 1)
    )
    with pytest.raises(CodeObjectError, match="cut off"):
        Elf(header)


@pytest.mark.parametrize(
    "line, mnemonic, operands, modifiers",
    [
        (
            "\tglobal_store_dword v[4:5], v0, off offset:16 sc0 sc1       // 000000001D08: DC708010 007F0004",
            "global_store_dword", ("v[4:5]", "v0", "off"), {"offset": "16", "sc0": "", "sc1": ""},
        ),
        (
            "\tbuffer_load_dwordx4 v18, s[8:11], 0 offen lds               // 000000001EF0: E05D1000 80020012",
            "buffer_load_dwordx4", ("v18", "s[8:11]", "0"), {"offen": "", "lds": ""},
        ),
        (
            "\tv_cvt_scalef32_pk_fp4_f32 v34, v4, v5, v1 op_sel:[0,0,1,0]// 000000001798: D23D2022 04060B04",
            "v_cvt_scalef32_pk_fp4_f32", ("v34", "v4", "v5", "v1"), {"op_sel": "[0,0,1,0]"},
        ),
        (
            "\tv_add_f32_dpp v0, |v1|, -v2 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1 // 000000000000: 020004FA",
            "v_add_f32_dpp", ("v0", "|v1|", "-v2"),
            {"row_shr": "1", "row_mask": "0xf", "bank_mask": "0xf", "bound_ctrl": "1"},
        ),
        (
            "\ts_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1            // 000000001704: BA0005C1 00000001",
            "s_setreg_imm32_b32", ("hwreg(HW_REG_MODE, 23, 1)", "1"), {},
        ),
        ("\tbuffer_inv sc0 sc1 // 0000000021F4: E8000000", "buffer_inv", (), {"sc0": "", "sc1": ""}),
        ("\ts_endpgm                                                   // 0000000054E4: BF810000", "s_endpgm", (), {}),
        ("\ts_waitcnt vmcnt(0) lgkmcnt(0) // 000000001EE0: BF8C0070", "s_waitcnt", ("vmcnt(0) lgkmcnt(0)",), {}),
    ],
)  # fmt: skip
def test_lines_of_disassembly(line: str, mnemonic: str, operands: tuple[str, ...], modifiers: dict[str, str]) -> None:
    item = parse_line(line)
    assert (item.mnemonic, item.operands, item.modifiers) == (mnemonic, operands, modifiers)


def test_branch_targets_come_from_the_encoding() -> None:
    forward = parse_line("\ts_branch 60                  // 000000001D0C: BF82003C <stage1+0x100>")
    backward = parse_line("\ts_cbranch_scc1 65370        // 000000002138: BF85FF5A")
    assert (forward.address, forward.branch_target) == (0x1D0C, 0x1E00)
    assert backward.branch_target == 0x213C - 4 * (65536 - 65370)


def test_a_line_that_is_not_understood_is_an_error() -> None:
    with pytest.raises(CodeObjectError, match="not understood"):
        parse_line("\t<unknown>")


@pytest.mark.parametrize(
    "vgprs, sgprs, lds, warps, workgroups, limiter",
    [
        (234, 100, 32772, 4, 2, "vgprs"),  # 512 / 240
        (128, 40, 81920, 4, 2, "lds"),
        (128, 40, 81921, 4, 1, "lds"),
        (64, 40, 0, 4, 8, "vgprs"),
        (512, 40, 163840, 4, 1, "vgprs"),
        (257, 40, 0, 8, 0, "vgprs"),  # two waves a SIMD don't fit
        (32, 102, 0, 4, 7, "sgprs"),
        (32, 40, 0, 1, 32, "vgprs"),
    ],
)
def test_occupancy(vgprs: int, sgprs: int, lds: int, warps: int, workgroups: int, limiter: str) -> None:
    found = occupancy(num_vgprs=vgprs, num_sgprs=sgprs, lds_bytes=lds, num_warps=warps)
    assert (found.workgroups_per_cu, found.limiter) == (workgroups, limiter)
    assert found.waves_per_simd == workgroups * warps / 4

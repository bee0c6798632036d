"""Everything that the SM90 kernel is compiled for, in plain numbers: the key of a compiled kernel."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.errors import ConfigError
from megamoe.problem import MAX_TOP_K, Activation, QuantMode, Transport
from megamoe.schedule.tiles import ceil_div
from megamoe.schedule.waves import Ring

THREADS_PER_WARP = 32
NUM_PRODUCER_WARPS = 4  # weight loader, activation loader, dispatch, publisher
NUM_DISPATCH_WARPS = 1
NUM_MATH_WARPS = 8  # two warpgroups
BLOCK_N = 256  # columns of a tile: 128 finished channels of GEMM1
BLOCK_K = 128  # bytes of K in a stage; in FP8 one activation scale, one weight scale, one promotion
PREFETCHED_K_BLOCKS = 6  # of a CTA's first tile, while ranks exchange counts; 32 KiB each, 25 of an H200's 50 MiB of L2
MAX_K = 64 * BLOCK_K  # elements; the longest rows that are tested
RAGGED_GRANULE = 32  # elements of a row that need not be whole 128-blocks: a scale of the FP8 transport
SWAPPED_ROWS = (8, 16, 32, 64)  # columns of WGMMAs with swapped operands (ptx/wgmma_few_columns.cuh)
CLUSTER_SIZES = (1, 2)
CONVERTER_GROUP_WARPS = 4  # that unpack a stage of weights together (roles/convert.cuh)
MAX_RANKS = 32  # one lane signals one peer
NUM_REGISTERS = 65536  # of an SM


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """Shape and pipeline of the GEMM tiles.

    Refused is what the kernel has no code for, or would wait for ever with. What is left is more than `heuristics.py`
    offers and tests run: blocks of 8, 16 or 64 rows that all have swapped operands, for one.

    Attributes:
        name: what `plan(problem, config=...)` calls it.
        block_m: rows of a block: 64 or 128 for each CTA of a cluster; fewer where all blocks have swapped operands.
        num_stages: shared-memory stages of 128 bytes of K.
        swapped_rows: blocks of up to so many rows are multiplied with swapped operands: the weights are the wide one,
            and rows are not padded to 64.
        box_rows: rows that one bulk copy of activations brings; copies without a valid row are left out. A divisor of
            tile_m.
        producer_registers: registers per thread of the producer warpgroup; a multiple of 8.
        math_registers: the same of the math warpgroups.
        cluster_size: CTAs that share a block's rows, and what they load of its weights (pipeline/cluster.cuh): 1 or 2.
        converter_warps: warps that make FP8 operands of packed weights, in mode a8w4: whole warpgroups.
        converter_registers: their registers per thread.
        packed_stages: stages of packed weights, 128 of K each.
        operand_buffers: what they become: stages take turns in so many buffers of FP8 weights. A divisor of num_stages.
        registers_hold_weights: in mode a8w4, the math warps look packed weights up into registers, for WGMMAs with
            swapped operands (pipeline/register_loop.cuh); all blocks have them.
        converts_ahead: the converter warps of all CTAs convert each expert once, into the workspace, and a stage holds
            what they stored there (roles/convert_ahead.cuh).
    """

    name: str
    block_m: int
    num_stages: int
    producer_registers: int
    math_registers: int
    box_rows: int
    swapped_rows: int = 0
    cluster_size: int = 1
    converter_warps: int = 0
    converter_registers: int = 0
    packed_stages: int = 0
    operand_buffers: int = 0
    registers_hold_weights: bool = False
    converts_ahead: bool = False

    def __post_init__(self) -> None:
        if self.cluster_size not in CLUSTER_SIZES:
            raise ConfigError("the SM90 kernel has no such clusters", got=self.cluster_size, expected=CLUSTER_SIZES)
        heights = (64, 128) if self.swapped_rows < self.block_m else SWAPPED_ROWS
        if self.block_m not in {height * self.cluster_size for height in heights}:
            raise ConfigError("the SM90 kernel has no such tile height", got=self.tile_m, expected=heights)
        if self.swapped_rows not in (0, *SWAPPED_ROWS) or self.swapped_rows > self.block_m:
            raise ConfigError("no operands are swapped for such rows", got=self.swapped_rows, expected=SWAPPED_ROWS)
        if self.tile_m % self.box_rows or self.box_rows % 8:
            raise ConfigError("bulk copies of so many rows do not fill a block", got=self.box_rows)
        if self.operand_buffers and self.num_stages % self.operand_buffers:
            raise ConfigError("stages take turns in the buffers of operands", got=self.num_stages)
        if self.converter_warps % CONVERTER_GROUP_WARPS:
            raise ConfigError("converter warps are no whole warpgroups", got=self.converter_warps)
        if self.packed_stages % max(self.converter_groups, 1):
            raise ConfigError("groups of converter warps do not share out packed stages", got=self.packed_stages)
        if self.converts_ahead and (self.packed_stages or self.operand_buffers or self.converter_groups != 1):
            raise ConfigError(
                "one group of warps converts ahead, and no packed stages pass through shared memory", got=self
            )
        if self.registers_hold_weights and (self.converter_warps or self.swapped_rows < self.block_m):
            raise ConfigError("weights in registers are swapped operands, which no warps convert", got=self)
        if self.registers_hold_weights and self.num_stages < 2:
            raise ConfigError("math warps wait for two stages of weights at once", got=self.num_stages)
        num_registers = (
            128 * self.producer_registers
            + THREADS_PER_WARP * self.math_warps * self.math_registers
            + THREADS_PER_WARP * self.converter_warps * self.converter_registers
        )
        available = self.num_threads * self.registers_at_entry
        if num_registers > available:  # the last warpgroup would wait for its registers for ever
            raise ConfigError("the warpgroups' registers exceed the CTA's", got=num_registers, expected=available)

    @property
    def tile_m(self) -> int:
        """Rows that one CTA multiplies."""
        return self.block_m // self.cluster_size

    @property
    def weight_stages(self) -> int:
        """Stages that weights may be ahead of the tensor cores."""
        return self.packed_stages + (self.operand_buffers or self.num_stages)

    @property
    def math_warps(self) -> int:
        """Warps that multiply: two warpgroups, or four that look their weights up."""
        return 2 * NUM_MATH_WARPS if self.registers_hold_weights else NUM_MATH_WARPS

    @property
    def converter_groups(self) -> int:
        """Groups of converter warps, which take K blocks in turn."""
        return self.converter_warps // CONVERTER_GROUP_WARPS

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        return THREADS_PER_WARP * (NUM_PRODUCER_WARPS + self.math_warps + self.converter_warps)

    @property
    def registers_at_entry(self) -> int:
        """Registers of every thread before warpgroups exchange them: a multiple of 8."""
        return NUM_REGISTERS // self.num_threads // 8 * 8


def element_bytes(quant: QuantMode) -> int:
    """Bytes of an activation's element in mode `quant`."""
    return 2 if quant is QuantMode.BF16 else 1


def row_granule(quant: QuantMode) -> int:
    """What divides the rows of a layer in mode `quant`, in elements: 128 where a weight scale covers that many."""
    return BLOCK_K if quant is QuantMode.A8W8 else RAGGED_GRANULE


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """One compiled kernel.

    As with `TileConfig`, more is compiled than sessions ask for: swapped operands with biases in mode a8w8, for one,
    and copies of activations narrower than a tile in mode bf16.

    Attributes:
        num_ranks: EP size.
        num_virtual_ranks: ranks that share this GPU in one launch: 1, or all of them.
        ctas_per_rank: CTAs of one rank, one per SM.
        num_local_experts, hidden_size, intermediate_size, top_k, num_max_tokens_per_rank: the problem.
        transport, activation, swiglu_limit, quant, expert_bias: the problem. `intermediate_size` is the problem's,
            rounded up to a multiple of 128 (`weights.py` pads with zeros).
        tile: tile shape and pipeline.
        ring: blocks of this tile height: ring size, lag, most blocks of a call.
        session_rings: the rings of all kernels that share the workspace, `ring` among them.
        tap_gemm1: also store GEMM1's accumulators, for tests.
        trace: also store time stamps of the phases.
        converted_experts: experts that the workspace has room for after conversion; 0 where no kernel of the session
            converts ahead.

    Raises:
        ConfigError: a value that the kernel does not take.
    """

    num_ranks: int
    num_virtual_ranks: int
    ctas_per_rank: int
    num_local_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    num_max_tokens_per_rank: int
    tile: TileConfig
    ring: Ring
    session_rings: tuple[Ring, ...]
    transport: Transport = Transport.BF16
    activation: Activation = Activation.SWIGLU
    swiglu_limit: float | None = None
    quant: QuantMode = QuantMode.A8W8
    expert_bias: bool = False
    tap_gemm1: bool = False
    trace: bool = False
    converted_experts: int = 0

    def __post_init__(self) -> None:
        for name, granule in (("hidden_size", row_granule(self.quant)), ("intermediate_size", BLOCK_K)):
            size = getattr(self, name)
            if size % granule or not 0 < size <= MAX_K:
                raise ConfigError(
                    f"{name} does not suit the kernel", got=size, expected=f"a multiple of {granule} <= {MAX_K}"
                )
        if not 1 <= self.top_k <= MAX_TOP_K:
            raise ConfigError("top_k is out of range", got=self.top_k, expected=f"1 to {MAX_TOP_K}")
        if not 1 <= self.num_ranks <= MAX_RANKS:
            raise ConfigError("num_ranks is out of range", got=self.num_ranks, expected=f"1 to {MAX_RANKS}")
        if self.num_virtual_ranks not in (1, self.num_ranks):
            raise ConfigError("virtual ranks are all or none", got=self.num_virtual_ranks, expected=(1, self.num_ranks))
        if self.tile.swapped_rows and self.quant is QuantMode.BF16:
            raise ConfigError("operands are swapped in modes a8w8 and a8w4 only", got=self.quant)
        if (self.tile.converter_warps > 0 or self.tile.registers_hold_weights) != (self.quant is QuantMode.A8W4):
            raise ConfigError("weights are packed in mode a8w4", got=f"{self.quant}, {self.tile}")
        if self.tile.converter_groups > min(self.gemm1_k_blocks, self.gemm2_k_blocks):
            raise ConfigError(
                "more groups of converter warps than K blocks of a tile: one would lose its place in the tile queue",
                got=self.tile.converter_groups,
            )
        if self.tile.converts_ahead and (not self.converted_experts or self.ring.group_blocks != 1):
            raise ConfigError(
                "what is converted ahead needs room, and blocks that come one by one",
                got=f"{self.converted_experts}, {self.ring}",
            )
        if self.tile.cluster_size > 1:
            self._require_clusters()
        if self.ring.block_m != self.tile.block_m or self.ring not in self.session_rings:
            raise ConfigError("the ring is not this tile's, or not the session's", got=self.ring)

    def _require_clusters(self) -> None:
        size, tiles = self.tile.cluster_size, (self.gemm1_n_tiles, self.gemm2_n_tiles)
        if self.quant is not QuantMode.BF16:  # a block's row scales are not cut, nor a stage's packed weights
            raise ConfigError("clusters multiply in mode bf16 only", got=str(self.quant))
        if any(number % size for number in tiles):
            raise ConfigError(f"clusters of {size} CTAs do not share out these column tiles", got=tiles)
        if self.ctas_per_rank % size or not self.ctas_per_rank:
            raise ConfigError(
                f"clusters of {size} CTAs do not share out these CTAs",
                got=self.ctas_per_rank,
                expected=f"a multiple of {size} for each rank",
                hint="give ranks more SMs, or pin a configuration without clusters",
            )

    @property
    def num_experts(self) -> int:
        """Global experts."""
        return self.num_ranks * self.num_local_experts

    @property
    def num_ctas(self) -> int:
        """CTAs of a launch."""
        return self.num_virtual_ranks * self.ctas_per_rank

    @property
    def split_m(self) -> bool:
        """Whether each math warpgroup takes half of the rows (and all columns), instead of half of the columns."""
        return self.tile.tile_m == 128

    @property
    def has_row_scales(self) -> bool:
        """Whether a row of activations has an FP32 scale per 128 elements."""
        return self.quant is not QuantMode.BF16

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the WGMMAs' operands."""
        return element_bytes(self.quant)

    @property
    def input_row_bytes(self) -> int:
        """Payload of a row of GEMM1's input."""
        return self.hidden_size * self.element_bytes

    @property
    def weight_box_rows(self) -> int:
        """Rows of weights that one bulk copy brings."""
        return BLOCK_N // self.tile.cluster_size

    @property
    def a2_row_bytes(self) -> int:
        """Payload of a row of GEMM2's input."""
        return self.intermediate_size * self.element_bytes

    @property
    def gemm1_k_blocks(self) -> int:
        """Stages of a GEMM1 tile."""
        return ceil_div(self.input_row_bytes, BLOCK_K)

    @property
    def gemm2_k_blocks(self) -> int:
        """Stages of a GEMM2 tile."""
        return self.a2_row_bytes // BLOCK_K

    @property
    def gemm1_n_tiles(self) -> int:
        """Column tiles of GEMM1, 2I columns."""
        return 2 * self.intermediate_size // BLOCK_N

    @property
    def gemm2_n_tiles(self) -> int:
        """Column tiles of GEMM2, H columns; the last one may be partly empty."""
        return ceil_div(self.hidden_size, BLOCK_N)

    @property
    def max_blocks(self) -> int:
        """Blocks that the workspace's counters are laid out for."""
        return max(ring.max_blocks for ring in self.session_rings)

    @property
    def ring_wraps(self) -> bool:
        """Whether a call can have more blocks than the ring holds."""
        return self.ring.max_blocks > self.ring.ring_blocks

    @property
    def unroll_by_ring(self) -> bool:
        """Whether every tile starts at stage 0, so that the main loop can be unrolled by the ring."""
        return self.gemm1_k_blocks % self.tile.num_stages == 0 and self.gemm2_k_blocks % self.tile.num_stages == 0

"""What is decided about a problem before anything is allocated: limits and plans. Pure."""

from __future__ import annotations

from megamoe.backend import Plan, Reason, Verdict
from megamoe.problem import MoEProblem
from megamoe.schedule.device_spec import MI355X, DeviceSpec
from megamoe_rocm.heuristics import SCALE_BLOCK_COLUMNS, SessionConfig, session_config
from megamoe_rocm.kernels.workspace import kernel_workspace
from megamoe_rocm.weights import BACKEND

MAX_RANKS = 8  # GPUs of a node, among which memory can be addressed; kernels/plan.py handles that many at once
MAX_ROWS = 2**31 - 1  # that a rank may receive: rows are counted, and a rank's picks numbered, in int32
MAX_EXPERT_BYTES = 2**31 - 1  # offsets within one expert's weights are 32-bit; its base is 64-bit


def check_limits(problem: MoEProblem) -> Verdict:
    """Sizes that the kernels do not take."""
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(problem, name)
        if size % SCALE_BLOCK_COLUMNS:
            return Verdict.no(
                Reason.SHAPE,
                f"{name} = {size} is not a multiple of {SCALE_BLOCK_COLUMNS}, the columns of a dword of scales",
            )
    if problem.hidden_size * problem.intermediate_size > MAX_EXPERT_BYTES:
        return Verdict.no(Reason.SHAPE, f"an expert's w13 exceeds {MAX_EXPERT_BYTES} bytes")
    if problem.ep_size > MAX_RANKS:
        return Verdict.no(Reason.EP_SIZE, f"ep_size = {problem.ep_size} exceeds {MAX_RANKS}, the GPUs of a node")
    if problem.ep_size * problem.num_max_tokens_per_rank * problem.top_k > MAX_ROWS:
        return Verdict.no(Reason.CAPACITY, f"ep_size * num_max_tokens_per_rank * top_k is above {MAX_ROWS}")
    return Verdict.yes()


def make_plan(
    problem: MoEProblem, device: DeviceSpec | None = None, *, config: str | SessionConfig | None = None
) -> Plan:
    """The plan of a problem within the limits.

    Args:
        problem: what to compute.
        device: None is a MI355X.
        config: None chooses a tile per call; a name pins one of the table; a `SessionConfig` brings its own.

    Raises:
        ConfigError: no configuration has the name.
    """
    chosen = config if isinstance(config, SessionConfig) else session_config(problem, config)
    return Plan(
        backend=BACKEND,
        problem=problem,
        device=device or MI355X,
        config=chosen,
        workspace=kernel_workspace(problem, chosen.rings),
    )

"""MegaMoE: fused expert-parallel mixture-of-experts layers.

    problem = megamoe.MoEProblem(hidden_size=4096, intermediate_size=2048, num_experts=256, top_k=8, ep_size=8,
                                 num_max_tokens_per_rank=8192, quant="a8w8")
    backend = megamoe.select_backend("auto", problem)
    plan = backend.plan(problem)
    with backend.open(plan, group) as moe:
        weights = moe.prepare_weights((w13, w13_scale), (w2, w2_scale), layout="packed")
        y = moe.forward(hidden_states, topk_ids, topk_weights, weights)

Beside these names: megamoe.tensors (weights as types), megamoe.errors, megamoe.checkpoint (reading safetensors),
megamoe.ops (an operator for torch.compile), megamoe.expert_map, megamoe.shared_experts and megamoe.meter (for engines),
megamoe.integrations (adapters), megamoe.env (environment variables), megamoe.testing (the conformance matrix).
"""

# Which module may import which is a test: LAYERS in tests/test_repository.py.

from megamoe._version import __version__
from megamoe.backend import Backend, Plan, Reason, Session, VirtualRanks
from megamoe.errors import MegaMoEError
from megamoe.problem import MoEProblem
from megamoe.registry import select_backend, selection_report
from megamoe.schedule.device_spec import H200, MI355X, DeviceSpec
from megamoe.tensors import PreparedWeights, expert_tensors

__all__ = [
    "H200",
    "MI355X",
    "Backend",
    "DeviceSpec",
    "MegaMoEError",
    "MoEProblem",
    "Plan",
    "PreparedWeights",
    "Reason",
    "Session",
    "VirtualRanks",
    "__version__",
    "expert_tensors",
    "select_backend",
    "selection_report",
]

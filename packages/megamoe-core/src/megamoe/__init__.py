"""MegaMoE: fused expert-parallel mixture-of-experts layers.

    problem = megamoe.MoEProblem(hidden_size=4096, intermediate_size=2048, num_experts=256, top_k=8, ep_size=8,
                                 num_max_tokens_per_rank=8192, quant="a8w8")
    backend = megamoe.select_backend("auto", problem)
    plan = backend.plan(problem)
    with backend.open(plan, group) as moe:
        weights = moe.prepare_weights(w13, w2, layout="packed")
        y = moe.forward(hidden_states, topk_ids, topk_weights, weights)

Import layers, each free to import only those before it:

    errors, env, problem, schedule, formats  ->  stages, layouts, symm  ->  tensors, backend, registry,
    expert_map, shared_experts, meter  ->  reference, ops, launch, testing, bench, checkpoint, integrations, cli
"""

from megamoe._version import __version__
from megamoe.backend import Backend, Plan, Reason, Session, VirtualRanks
from megamoe.errors import MegaMoEError
from megamoe.problem import MoEProblem
from megamoe.registry import select_backend, selection_report
from megamoe.tensors import PreparedWeights, expert_tensors

__all__ = [
    "Backend",
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

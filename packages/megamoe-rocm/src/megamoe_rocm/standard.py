"""Every kernel that sessions of the standard configurations load, for checks that need no session and no memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

import torch

from megamoe.problem import Activation, MoEProblem, QuantMode, Transport
from megamoe.symm import PeerMemory
from megamoe_rocm.heuristics import config_names
from megamoe_rocm.kernels.launch import GFX950, Launch, Target
from megamoe_rocm.planning import make_plan
from megamoe_rocm.runtime.launcher import Launcher, kernel_key
from megamoe_rocm.session import RocmSession


class Collector(Launcher):
    """Remembers the launches whose kernels are loaded, one a kernel. Its tensors have no memory."""

    def __init__(self, target: Target = GFX950) -> None:
        self.device, self.target = torch.device("meta"), target
        self.found: dict[Hashable, Launch] = {}

    def load(self, launches: Iterable[Launch]) -> None:
        """Remember."""
        for launch in launches:
            self.found.setdefault(kernel_key(launch), launch)

    def launch(self, launch: Launch, *, rank: int) -> None:
        """Nothing is run."""
        raise AssertionError("this launcher collects")


def collect(problem: MoEProblem, collector: Collector, *, config: str | None = None, taps: bool = False) -> None:
    """Have a session load what it can need, and with `taps` what it needs to keep them."""
    plan = make_plan(problem, config=config)

    def allocate(num_bytes: int) -> PeerMemory:
        ranks = [torch.empty(num_bytes, dtype=torch.uint8, device="meta") for _ in range(problem.ep_size)]
        return PeerMemory(ranks=tuple(ranks), release=lambda: None)

    session = RocmSession(plan, group=None, virtual=True, launcher=collector, timeout_s=1.0, allocate=allocate)
    session.start()
    session.warmup()
    if taps:
        session.keep_taps()
        session.warmup()


def standard_launches() -> Iterator[tuple[str, Launch]]:
    """Name and launch of every kernel: modes, transports, activations, biases, tiles."""
    collector = Collector()
    for quant in (QuantMode.A4W4, QuantMode.A8W4):
        for transport in Transport:
            for activation in Activation:
                for expert_bias in (False, True):
                    problem = MoEProblem(
                        hidden_size=512,
                        intermediate_size=256,
                        num_experts=8,
                        top_k=2,
                        num_max_tokens_per_rank=8192,
                        quant=quant,
                        transport=transport,
                        activation=activation,
                        expert_bias=expert_bias,
                    )
                    for config in config_names():
                        collect(problem, collector, config=config)
    for launch in collector.found.values():
        chosen = ", ".join(f"{name}={value}" for name, value in launch.constants.items())
        yield f"{launch.kernel.__name__}({chosen}, {launch.num_warps} waves)", launch

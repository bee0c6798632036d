"""The ROCm backend as `megamoe.select_backend` sees it: what it can run and where, its plans, and how one is opened."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from megamoe.backend import Backend, Capability, Plan, Reason, Session, Verdict
from megamoe.errors import ConfigError
from megamoe.opening import ranks_of, wait_s
from megamoe.problem import MoEProblem
from megamoe.schedule.device_spec import DeviceSpec
from megamoe_rocm import __version__, planning, rungs
from megamoe_rocm.heuristics import SessionConfig, config_names
from megamoe_rocm.probe import probe
from megamoe_rocm.rungs import Rung


class RocmBackend(Backend):
    """AMD gfx950, and the stand-ins on which its kernels are rehearsed (MEGAMOE_ROCM_DEVICE, `megamoe_rocm.rungs`)."""

    name: ClassVar[str] = "rocm"

    def probe(self) -> Verdict:
        """Whether this machine has what the rung needs: a gfx950 GPU and the libraries that drive it, or a stand-in."""
        return probe(rungs.current())

    def capabilities(self) -> frozenset[Capability]:
        """What was seen right on the rung; all that is written, where the rung was asked for by name."""
        rung = rungs.current()
        claimed = rungs.SEEN_RIGHT_ON[rung] is not None or rungs.asked_for() is Rung.GFX950
        return rungs.implemented(rung) if claimed else frozenset()

    def supports(self, problem: MoEProblem) -> Verdict:
        """See `Backend.supports`."""
        if not self.capabilities():
            rung = rungs.current()
            what_to_do = "MEGAMOE_ROCM_DEVICE=gfx950 runs it all the same, and " if rung is Rung.GFX950 else ""
            return Verdict.no(
                Reason.QUANT,
                f"megamoe-rocm {__version__} has not been seen right on {rungs.WHAT[rung]} yet: "
                f"{what_to_do}`megamoe-rocm validate --device {rung}` finds out",
            )
        return super().supports(problem)

    def check_limits(self, problem: MoEProblem) -> Verdict:
        """Sizes that the kernels do not take."""
        return planning.check_limits(problem)

    def configs(self, problem: MoEProblem) -> tuple[str, ...]:
        """ "auto", which picks a tile per call, then each tile by name."""
        return config_names()

    def plan(self, problem: MoEProblem, device: DeviceSpec | None = None, *, config: str | None = None) -> Plan:
        """See `Backend.plan`. `device.num_sms` is how many compute units the persistent launches are made for."""
        self.require(problem, device)
        return planning.make_plan(problem, device or rungs.PLANNED_FOR[rungs.current()], config=config)

    def open(
        self, plan: Plan, group: Any = None, *, timeout_s: float | None = None, workspace: Tensor | None = None
    ) -> Session:
        """COLLECTIVE. See `Backend.open`.

        Symmetric memory of a `torch.distributed.ProcessGroup` comes from Mori on AMD and from PyTorch on NVIDIA; that
        of a `megamoe.symm.Group`, from that group. A workspace of the caller's is not taken.

        Raises:
            BackendUnavailableError: the wrong GPU, a missing library, no peer-to-peer path; on every rank, before any
                memory is shared.
        """
        if workspace is not None:
            raise ConfigError("backend rocm takes no workspace", hint="leave workspace=None; plan.bytes says its size")
        timeout_s = wait_s(timeout_s)
        ranks = ranks_of(group, plan, self.name, SessionConfig)
        from megamoe_rocm.opening import open_session  # needs Triton, which planning does not

        return open_session(plan, group, ranks, rung=rungs.current(), timeout_s=timeout_s)

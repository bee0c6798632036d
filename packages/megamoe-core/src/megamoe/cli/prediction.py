"""`megamoe plan --simulate`: what a plan's calls should take, and, on paper, what larger groups would."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from megamoe.backend import Plan
from megamoe.cli.console import out, say
from megamoe.errors import ConfigError
from megamoe.problem import QuantMode
from megamoe.schedule.expected_rows import expected_rows, uniform_sources
from megamoe.schedule.kernel_rates import KERNEL_RATES, links_of
from megamoe.schedule.simulate import Prediction, Tiled, simulate

TOKENS = (8, 128, 256, 512, 1024, 2048, 4096, 8192)  # per rank
NVLINK_DOMAIN = 8  # GPUs that an H200 baseboard connects
PAPER_GROUPS = ((8, 8), (16, 8), (16, 72), (32, 8), (32, 72), (64, 8), (64, 72))  # ep_size, NVLink domain
PAPER = (
    "on paper: no such group was run. Across domains rows are taken to go over a 400 Gb/s adapter per GPU, "
    "which the kernels can't do today"
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A predicted call: uniform routing, quantised inputs, a flushed cache, `num_tokens` on each of `ep_size` ranks."""

    ep_size: int
    domain_size: int
    num_tokens: int
    prediction: Prediction

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        sizes = {"ep_size": self.ep_size, "nvlink_domain": self.domain_size, "num_tokens": self.num_tokens}
        return sizes | asdict(self.prediction)


def why_not(plan: Plan) -> str | None:
    """Why the plan can't be simulated, or None."""
    if not isinstance(plan.config, Tiled):
        return f"backend {plan.backend} has no model of its schedule"
    if plan.device.name not in KERNEL_RATES:
        return f"the pieces of a call were not measured on {plan.device.name}"
    if plan.problem.quant is not QuantMode.A8W8:
        return f"the main loop of {plan.problem.quant} was not measured on {plan.device.name}"
    return None


def predict(plan: Plan, num_tokens: int, *, ep_size: int | None = None, domain_size: int = NVLINK_DOMAIN) -> Call:
    """A call of `plan`, or of the same experts, tiles and ring over another number of ranks.

    Raises:
        ConfigError: `why_not`.
    """
    reason = why_not(plan)
    if reason is not None or not isinstance(plan.config, Tiled):
        raise ConfigError("this plan can't be simulated", got=reason)
    problem = plan.problem if ep_size is None else replace(plan.problem, ep_size=ep_size)
    prediction = simulate(
        problem,
        plan.config.tiling(problem, num_tokens, plan.device.num_sms),
        num_tokens=num_tokens,
        rows_per_expert=expected_rows(uniform_sources(problem, num_tokens), problem.num_local_experts),
        links=links_of(plan.device, problem.ep_size, domain_size),
        rates=KERNEL_RATES[plan.device.name],
        dirty_l2_bytes=plan.device.l2_bytes or 0,  # as after the flush of a benchmark
    )
    return Call(ep_size=problem.ep_size, domain_size=domain_size, num_tokens=num_tokens, prediction=prediction)


def predict_plan(plan: Plan) -> list[Call]:
    """The usual token counts up to the capacity, and the capacity."""
    capacity = plan.problem.num_max_tokens_per_rank
    counts = sorted({count for count in TOKENS if count < capacity} | {capacity})
    return [predict(plan, count) for count in counts]


def predict_on_paper(plan: Plan) -> list[Call]:
    """One small call, one middling and a full one on groups that divide the experts."""
    capacity = plan.problem.num_max_tokens_per_rank
    counts = sorted({min(count, capacity) for count in (8, 512, capacity)})
    return [
        predict(plan, count, ep_size=ep_size, domain_size=domain_size)
        for ep_size, domain_size in PAPER_GROUPS
        if plan.problem.num_experts % ep_size == 0
        for count in counts
    ]


def print_prediction(plan: Plan, *, on_paper: bool) -> None:
    """A table of `predict_plan`, on request one of `predict_on_paper`, or why there is none."""
    reason = why_not(plan)
    if reason is not None:
        say(f"no prediction: {reason}")
        return
    columns = ("tokens", "µs", "exchange", "multiply", "finish", "combine", "blocks", "HBM MB", "link MB")
    table = Table(*columns, padding=0)  # fits 80 columns
    table.title = f"predicted: EP{plan.problem.ep_size}, tokens per rank, uniform routing, quantised inputs"
    for column in table.columns:
        column.justify = "right"
    for call in predict_plan(plan):
        each = call.prediction
        times = (each.us, each.exchange_us, each.multiply_us, each.finish_us, each.combine_us)
        moved = (f"{each.hbm_bytes / 1e6:.0f}", f"{each.link_bytes / 1e6:.1f}")
        table.add_row(str(call.num_tokens), *(f"{us:.0f}" for us in times), str(each.num_blocks), *moved)
    out.print(table)
    if on_paper:
        _print_paper(plan)


def _print_paper(plan: Plan) -> None:
    paper = Table("group", "tokens", "µs", "link MB", title=PAPER)
    for column in paper.columns[1:]:
        column.justify = "right"
    for call in predict_on_paper(plan):
        group = f"EP{call.ep_size}, NVLink domains of {call.domain_size}"
        link = f"{call.prediction.link_bytes / 1e6:.1f}"
        paper.add_row(group, str(call.num_tokens), f"{call.prediction.us:.0f}", link)
    out.print(paper)

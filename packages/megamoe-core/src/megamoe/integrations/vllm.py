"""MegaMoE in vLLM: a quantisation method of its own for FP8-block checkpoints, chosen by one option.

    vllm serve MODEL --quantization megamoe --enable-expert-parallel --data-parallel-size 8
    vllm serve MODEL --quantization megamoe --additional-config '{"megamoe": {"unsupported": "engine"}}'

vLLM finds `plugin` through the entry point in its group `vllm.general_plugins`. docs/vllm.md is the guide. Nothing is
changed for models that are started without the option.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from megamoe.errors import ConfigError
from megamoe.integrations.versions import require_version

if TYPE_CHECKING:
    from megamoe.meter import Metrics

SUPPORTED = ">=0.33,<0.34"  # as the extra `vllm` of megamoe-core says
NAME = "megamoe"

logger = logging.getLogger("megamoe")


def register() -> None:
    """Make `--quantization megamoe` a choice in this process. Calling it again changes nothing.

    Raises:
        ConfigError: vLLM is missing or outside of the supported range, or the name stands for something else.
    """
    require_version("vllm", SUPPORTED)
    from megamoe.integrations import vllm_moe

    vllm_moe.enter()


def plugin() -> None:
    """What vLLM calls in each of its processes. It never raises: vLLM would not start, whatever the model."""
    try:
        register()
    except (ConfigError, ImportError) as error:
        logger.warning("--quantization %s is not available in vLLM: %s", NAME, error)


def metrics() -> list[Metrics]:
    """What each session's calls did in this process since this was asked last. Synchronises.

    Empty without the option `metrics`, and in processes that hold no model: vLLM's workers do.
    """
    from megamoe.integrations import vllm_moe

    return vllm_moe.metrics()


class WorkerExtension:
    """For vLLM's `--worker-extension-cls megamoe.integrations.vllm.WorkerExtension`: its methods reach every worker.

    `llm.collective_rpc("megamoe_metrics")` returns a list per worker.
    """

    def megamoe_metrics(self) -> list[dict[str, Any]]:
        """`metrics()` as plain values, which vLLM carries between processes."""
        return [one.as_dict() for one in metrics()]


def close() -> None:
    """COLLECTIVE where experts are spread over ranks. Close the sessions of this process; its models can't run then."""
    from megamoe.integrations import vllm_moe

    vllm_moe.close()

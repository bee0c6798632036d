"""What a process lives through around calls: an interrupt in the middle of one, a fork, models built on no device."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from layers import make_layer

from megamoe.errors import RankFailedError, SessionError
from megamoe.reference.backend import ReferenceBackend
from megamoe.symm import InprocGroup

BACKEND = ReferenceBackend()


def test_an_interrupt_in_the_middle_of_a_call() -> None:
    """Ctrl-C while rank 0 waits for its peer: felt at once, told to the peer, and a reset of both makes it right."""
    layer = make_layer(ep_size=2)
    groups, plan = InprocGroup.create(2), BACKEND.plan(layer.problem)
    started = threading.Event()

    def peer() -> torch.Tensor:
        torch.set_num_threads(1)
        with BACKEND.open(plan, groups[1], timeout_s=20) as session:
            weights = session.prepare(layer.weights(1))
            assert started.wait(20)
            with pytest.raises(RankFailedError):
                session.forward(*layer.tokens(1), weights)
            session.reset()
            return session.forward(*layer.tokens(1), weights)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(peer)
        with BACKEND.open(plan, groups[0], timeout_s=20) as session:
            weights = session.prepare(layer.weights(0))
            previous = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
            # Again after 2 s: Python loses a KeyboardInterrupt that comes while a finalizer runs.
            signal.setitimer(signal.ITIMER_REAL, 0.3, 2.0)
            began = time.monotonic()
            try:
                with pytest.raises(KeyboardInterrupt):
                    session.forward(*layer.tokens(0), weights)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, previous)
            assert time.monotonic() - began < 5
            with pytest.raises(SessionError, match="KeyboardInterrupt"):
                session.forward(*layer.tokens(0), weights)
            started.set()
            session.reset()
            outputs = session.forward(*layer.tokens(0), weights), other.result(20)
    alone = make_layer(ep_size=2).over(1)
    with BACKEND.open(BACKEND.plan(alone.problem)) as session:
        expected = session.forward(*alone.tokens(0), session.prepare(alone.weights(0)))
    assert torch.equal(torch.cat(outputs), expected)


FORKED = """
import os, sys
import torch
import megamoe
from megamoe.reference.backend import ReferenceBackend
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
torch.set_num_threads(1)
problem = megamoe.MoEProblem(
    hidden_size=64, intermediate_size=32, num_experts=2, top_k=1, num_max_tokens_per_rank=4, quant="bf16"
)
backend = ReferenceBackend()
with backend.open(backend.plan(problem)) as session:
    ones = torch.ones(2, 64, 64, dtype=torch.bfloat16)
    weights = session.prepare_weights(ones / 64, ones[:, :, :32] / 32, layout="packed")
    ids = torch.zeros(4, 1, dtype=torch.int32)
    y = session.forward(torch.ones(4, 64).bfloat16(), ids, torch.ones(4, 1), weights)
os._exit(0 if abs(float(y.mean()) - 0.731) < 0.01 else 1)
"""


def test_a_fork_after_the_import() -> None:
    """A child of a process that has imported MegaMoE opens a session of its own: silu(1) * 1 is 0.731."""
    result = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


INHERITED = """
import os, sys
import torch
import megamoe
from megamoe.errors import SessionError
from megamoe.reference.backend import ReferenceBackend
problem = megamoe.MoEProblem(
    hidden_size=64, intermediate_size=32, num_experts=2, top_k=1, num_max_tokens_per_rank=4, quant="bf16"
)
backend = ReferenceBackend()
plan = backend.plan(problem)
closed, session = backend.open(plan), backend.open(plan)
closed.close()
child = os.fork()
if child:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    session.stats()
    sys.exit(status)
found = []
for one in (session, closed):
    try:
        one.stats()
    except SessionError as error:
        found.append(str(error))
session.close()
os._exit(0 if "forked this one" in found[0] and "is closed" in found[1] else 1)
"""


def test_a_session_belongs_to_the_process_that_opened_it() -> None:
    """A forked child would use its parent's workspace; there it is refused, and the parent's stays open."""
    result = subprocess.run([sys.executable, "-c", INHERITED], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_a_model_built_on_no_device_opens_nothing() -> None:
    """Engines build models under the meta device first: no session, so no collective, before the first forward."""
    pytest.importorskip("transformers", reason="the transformers extra is not installed")
    import tiny_models
    import transformers

    from megamoe.integrations import transformers as megamoe_transformers

    adapter = megamoe_transformers.register("megamoe_on_no_device", num_max_tokens_per_rank=64)
    try:
        with torch.device("meta"):
            config = tiny_models.config("mixtral")
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, experts_implementation="megamoe_on_no_device"
            )
        assert adapter.problems() == ()
        experts = tiny_models.experts_modules(model)[0].to_empty(device="cpu")
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.normal_(std=0.1)
            x, ids, weights = tiny_models.tokens(5)
            assert experts(x, ids, weights).isfinite().all()
        assert len(adapter.problems()) == 1
    finally:
        adapter.close()

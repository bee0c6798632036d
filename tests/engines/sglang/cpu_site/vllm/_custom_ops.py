"""Stands for the package that SGLang imports a kernel from on CPUs without AMX, and whose kernel it never calls."""

from __future__ import annotations


def rotary_embedding(*_: object) -> None:
    raise NotImplementedError("SGLang calls its own rotary embedding on a CPU")

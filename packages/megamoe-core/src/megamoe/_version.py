"""The version of this distribution; the three packages are released in lockstep."""

__version__ = "0.1.0"

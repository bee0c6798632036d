from .api import *  # noqa: F403  # as the package does

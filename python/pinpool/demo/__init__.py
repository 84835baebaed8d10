"""The job behind `pinpool demo`: a real model whose layers are streamed out of pool blocks, lap after lap.

Only `bert`, `stream` and `job` import torch, so that the command line starts, and can say what is missing, without it.
"""


class DemoError(Exception):
    """What the user gave cannot be used. The message is one line that names the file or option and the reason."""

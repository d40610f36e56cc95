"""Plain decoding is a drafter that proposes nothing."""

from blockdraft.speculate.drafters.base import ModelFree


class NoDrafter(ModelFree):
    """Proposes nothing."""

    kind = "none"
    max_nodes = 0

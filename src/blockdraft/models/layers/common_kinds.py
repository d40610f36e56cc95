"""The families of transformers models whose code was read: their parts may be replaced.

A list, because equal bits in a check do not show what another kind does to other numbers.
"""

from torch import nn

_FAMILIES = (("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"))


def common_kinds(part: str) -> frozenset[str]:
    """The classes of these families whose names end so, such as "RMSNorm"; see `kind_of`."""
    return frozenset(
        f"transformers.models.{module}.modeling_{module}.{name}{part}" for module, name in _FAMILIES
    )


def kind_of(module: nn.Module) -> str:
    """The full name of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"

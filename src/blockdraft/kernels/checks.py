"""What kernels of any device refuse, since they would read it as other numbers than it is."""

from torch import Tensor


def check_like(tensor: Tensor, *others: Tensor) -> None:
    """Raises RuntimeError if types or devices differ, as torch's own operations would say."""
    for other in others:
        if other.dtype != tensor.dtype or other.device != tensor.device:
            raise RuntimeError(
                f"expected {tensor.dtype} on {tensor.device} throughout, "
                f"and found {other.dtype} on {other.device}"
            )


def check_sizes(are_right: bool) -> None:
    """Raises RuntimeError for tensors that do not fit each other."""
    if not are_right:
        raise RuntimeError("the sizes of the tensors do not fit each other")

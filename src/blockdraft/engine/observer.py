"""Looking on while an engine works."""

from typing import Protocol

from torch import Tensor

from blockdraft.core.plan import ForwardPlan
from blockdraft.speculate.commit import StepOutput
from blockdraft.speculate.verify import Verdict


class Observer(Protocol):
    """Is told what happens and changes nothing. An engine without one does no work for it."""

    def verified(self, plan: ForwardPlan, logits: Tensor, verdicts: list[Verdict]) -> None:
        """The target has decided about a plan, and nothing of it is committed yet.

        A step that fails later is made again, and told again.

        plan: each row's candidates, with their parents and sources. logits: [positions, V], as in
        TargetOutput.
        """
        ...

    def reported(self, outputs: list[StepOutput]) -> None:
        """What was committed; told once, and again only if this call is interrupted."""
        ...

"""Small modules with a router and experts: some as models write them, some that are others."""

from __future__ import annotations

import torch
from torch import nn

from tests.compiler.test_pack_experts import Experts


class Routed(Experts):
    """Experts with a router of their own before them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weights, ids = self.choose(self.router(x))
        return super().forward(x, ids, weights)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = logits.softmax(-1).topk(2)
        return weights, ids

    def groups_left(self, scores: torch.Tensor, least: float, dim: int = -1) -> torch.Tensor:
        best = scores.view(-1, 2, 2).max(-1).values
        marks = torch.zeros_like(best).scatter(1, best.topk(1).indices, 1)
        left_out = ~marks.unsqueeze(dim).expand(-1, 2, 2).reshape(-1, 4).bool()
        return scores.masked_fill(left_out, least)


class Smallest(Routed):
    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = logits.softmax(-1).topk(2, largest=False)
        return weights, ids


class OfAll(Routed):
    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.sigmoid()
        weights, ids = scores.topk(2)
        return weights / scores.sum(-1, keepdim=True), ids


class Relu(Routed):
    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = logits.relu().topk(2)
        return weights, ids


class BiasWeighs(Routed):
    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = (logits.softmax(-1) + self.bias).topk(2)
        return weights, ids


class OtherScores(Routed):
    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, ids = (logits.softmax(-1) + self.bias).topk(2)
        return logits.sigmoid().gather(1, ids), ids


class NegativeBeforeMask(Routed):
    """Experts of other groups have 0, which is above a bias that is negative."""

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.sigmoid()
        _, ids = self.groups_left(scores + self.bias, 0.0).topk(2)
        return scores.gather(1, ids), ids


class OtherGroups(Routed):
    """Experts of a group do not lie side by side."""

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = self.groups_left(logits.softmax(-1), -torch.inf, dim=1).topk(2)
        return weights, ids


class MoreThanGroupsHave(Routed):
    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = self.groups_left(logits.softmax(-1), 0.0).topk(3)
        return weights, ids


class TwiceAdded(Routed):
    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = logits.softmax(-1).topk(2)
        return weights / torch.add(weights.sum(-1, keepdim=True), 0.5, alpha=2), ids


class TwoChoices(Routed):
    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, _ = logits.softmax(-1).topk(2)
        _, ids = (logits + self.bias).topk(2)
        return weights, ids


class AcrossRows(Routed):
    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = logits.softmax(0).topk(2)
        return weights, ids


class ChoosesRounded(Routed):
    """Rounded scores are equal more often."""

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = logits.bfloat16().softmax(-1).topk(2)
        return weights.float(), ids


class SoftmaxRounds(Routed):
    """Logits, not weights, are rounded."""

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = (logits + 300).topk(2)
        return values.softmax(-1, dtype=torch.bfloat16).float(), ids


class GroupsRound(Routed):
    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.softmax(-1)
        best = scores.view(-1, 2, 2).topk(2).values.sum(-1, dtype=torch.bfloat16)
        marks = torch.zeros_like(best).scatter(1, best.topk(1).indices, 1)
        left_out = ~marks.unsqueeze(-1).expand(-1, 2, 2).reshape(-1, 4).bool()
        weights, ids = scores.masked_fill(left_out, 0.0).topk(2)
        return weights, ids


class BiasIsANumber(Routed):
    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.softmax(-1)
        _, ids = (scores + logits.shape[0]).topk(2)
        return scores.gather(1, ids), ids


class WholeWeights(Routed):
    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = logits.softmax(-1).topk(2)
        return weights.int().float(), ids


LEFT: dict[type[Routed], str] = {
    Smallest: "expected the largest of the last dim, got (2, -1, False)",
    OfAll: "expected weights divided by their own sum",
    Relu: "expected softmax or sigmoid, got aten.relu.default",
    BiasWeighs: "expected softmax or sigmoid, got aten.add.Tensor",
    OtherScores: "expected two different operands of add",
    NegativeBeforeMask: "expected -inf of other groups, got 0.0",
    OtherGroups: "expected groups of experts that lie side by side",
    MoreThanGroupsHave: "route: num_active: expected at most the 2 experts of active groups, got 3",
    TwiceAdded: "expected a number added to a sum as it is",
    TwoChoices: "expected experts and weights of one choice",
    AcrossRows: "expected experts in the last dim of softmax",
    ChoosesRounded: "expected a choice among scores in float32",
    SoftmaxRounds: "expected a softmax of logits as they are",
    GroupsRound: "expected a sum over a group, in its own dtype",
    BiasIsANumber: "expected a bias of each expert",
    WholeWeights: "expected what is chosen, got aten.to.dtype",
}


class MaskedByZero(Routed):
    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = self.groups_left(logits.softmax(-1), 0.0).topk(2)
        return weights, ids


class Twice(Routed):
    """What else reads the choice gets it too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weights, ids = self.choose(self.router(x))
        return Experts.forward(self, x, ids, weights) + ids.sum(1, keepdim=True)


class TwoMixtures(Routed):
    """One router of two mixtures."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weights, ids = self.choose(self.router(x))
        return Experts.forward(self, x, ids, weights) * Experts.forward(self, x * 2, ids, weights)


class TwoMixturesInHalves(Routed):
    """Each mixture widens the weights by itself, and ids are in no order."""

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = logits.softmax(-1).topk(3, sorted=False)
        return weights.half(), ids

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weights, ids = self.choose(self.router(x))
        own = ids > 0
        first = Experts.forward(self, x, ids, torch.where(own, weights.float(), 0))
        return first * Experts.forward(self, x * 2, ids, torch.where(own, weights.float(), 0))


class ReadsValues(Routed):
    """What else reads the values of a choice without an order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        logits = self.router(x)
        values, ids = logits.softmax(-1).topk(3, sorted=False)
        total = Experts.forward(self, x, ids, values / values.sum(-1, keepdim=True))
        return total + torch.zeros_like(logits).scatter(1, ids, values)[:, :1]


class OfTwoRanks(Routed):
    """As a rank of two has half of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", torch.tensor([[0], [-1], [1], [-1]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weights, ids = self.choose(self.router(x))
        own = nn.functional.embedding(ids, self.own)[..., 0]  # type: ignore[arg-type]
        return Experts.forward(self, x, own.clamp(0), torch.where(own >= 0, weights, 0))

"""Optimizers as people write them."""

import torch


class Around(torch.optim.Optimizer):
    """Wraps an optimizer as accelerate does: with that one's state, groups and defaults."""

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def __init__(self, params, base=torch.optim.AdamW, scaler=None):
        self.optimizer = base(params)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return self.optimizer.state_dict()


class FindsItsRate(torch.optim.Optimizer):
    """Keeps what it learns in its groups, as Prodigy and ScheduleFree do; its first step puts a count there,
    as those of timm and apex do."""

    def __init__(self, params, lr=1.0, d0=0.125, **others):
        super().__init__(params, {"lr": lr, "d0": d0, "d": d0, "k": 0, "best": 1.0, "train_mode": False})

    def step(self, closure=None):
        for group in self.param_groups:
            group["d"], group["k"], group["train_mode"] = group["d"] * 1.5, group["k"] + 1, True
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                self.state[parameter]["s"] = torch.ones_like(parameter)


class Tree(torch.optim.Optimizer):
    """Keeps lists, dicts, texts and float32 tensors of each parameter, whatever its dtype, as SOAP does."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["kind"], state["none"], state["count"] = "plain", None, 0
                state["factors"] = [
                    torch.zeros(2, 3).T,
                    {"flag": torch.tensor([True, False]), "at": [1, 2.5]},
                ]
            state["mean"].add_(1 / 3)
            state["count"] += 1


class Counting(torch.optim.Optimizer):
    """Sets all that it keeps of a parameter to its count of steps."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            for key, dtype in (("wide", torch.float64), ("half", torch.bfloat16), ("whole", torch.uint8)):
                state.setdefault(key, torch.empty_like(parameter, dtype=dtype)).fill_(self.count)
            state["plain"] = self.count

"""Optimizers that wrap another one, as people write them."""

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

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)


class SlowlyAround(Around):
    """Like timm's Lookahead: its own state is empty, and its `state_dict` is the inner optimizer's."""

    state = None

    def __init__(self, params, base=torch.optim.AdamW):
        super().__init__(params, base)
        self.state = {}


class Sharpness(torch.optim.Optimizer):
    """Like SAM: it keeps a state of its own beside the inner optimizer's, and saves only its own."""

    def __init__(self, params, base=torch.optim.AdamW):
        super().__init__(params, {"rho": 0.05})
        self.base = self._held(base(self.param_groups))
        self.param_groups = self._base().param_groups

    def _held(self, base):
        return base

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["before"] = parameter.detach().clone()
        return self._base().step(closure)

    def _base(self):
        return self.base


class SharpnessInList(Sharpness):
    def _held(self, base):
        return [base]

    def _base(self):
        return self.base[0]

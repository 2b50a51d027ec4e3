"""A callback that changes the training: yolofleet train ... --callbacks examples/my_limit.py:LimitBiases"""

import torch

from yolofleet import Callback


class LimitBiases(Callback):
    """Keeps all biases within -4.5..4.5: it changes the training, so it says so, and every rank runs it."""

    changes_training = True

    def start(self, run):
        network = run.state.replicas.all[0].model
        self.biases = [p for name, p in network.named_parameters() if name.endswith(".bias")]

    def step(self, step):
        with torch.no_grad():
            for bias in self.biases:
                bias.clamp_(-4.5, 4.5)
